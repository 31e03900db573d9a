from hush.accounting.pld.curves import Curve


def allocated(base: Curve, lots: int, *, delta: float) -> tuple[Curve, Curve]:
    raise ValueError
