"""jax-privacy as a way to take the step of a case, and the step that JAX takes without privacy.

Weights and batch are those of the PyTorch case under PyTorch's names; networks are pure functions of them. A step is
one jitted function that overwrites the weights: clipping and noise by jax-privacy with its defaults, the sum divided by
the batch size, SGD. Where the case asks for autocast, products are in bfloat16 and norms and sums in float32, as
PyTorch has it; elsewhere float32 is not rounded to tf32. Noise is JAX's threefry, not a secure stream; no lot is drawn.
"""

import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cases import Case, Transformer
from forms import Unavailable, prepare
from torch import nn

if TYPE_CHECKING:
    from jax import Array

Weights = dict[str, Any]
ONE_BY_ONE = ("mlp60", "mlp784", "cnn24", "transformer")
"""On a CPU these are faster in microbatches of one example: XLA sums gradients of many examples slowly there."""


class JaxStep:
    """A step that waits for its end: JAX only asks for work, and PyTorch's synchronisation knows nothing of it."""

    def __init__(self, compiled: Any, state: tuple, fixed: tuple, note: str) -> None:
        self._compiled, self._state, self._fixed = compiled, state, fixed
        self.note = note

    def __call__(self, count: int = 1) -> None:
        """Several steps are waited for once, as PyTorch's are in a turn of the measurement."""
        import jax

        for _ in range(count):
            self._state = self._compiled(*self._state, *self._fixed)
        jax.block_until_ready(self._state)

    def planned_mib(self) -> float:
        """What the compiler plans for a step: what goes in, what comes out elsewhere, and what lies between."""
        plan = self._compiled.memory_analysis()
        held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
        return (held + plan.temp_size_in_bytes) / 2**20


def ways() -> dict[str, Callable[[Case, str], JaxStep]]:
    """All ways, by name."""
    return {"jax-privacy": private, "jax, not private": not_private}


def private(case: Case, device: str) -> JaxStep:
    """Gradients of all examples at once."""
    need_jax()
    import jax_privacy

    def build(loss: Callable, trainable: Weights, size: int) -> tuple[Callable, Any]:
        few = 1 if device == "cpu" and case.name in ONE_BY_ONE else None
        clipped = jax_privacy.clipped_grad(
            loss, l2_clip_norm=1.0, normalize_by=size, batch_argnums=(2, 3), microbatch_size=few
        )
        noise = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.0 * clipped.sensitivity(), prng_key=0)
        return lambda state, *arguments: noise.update(clipped(*arguments), state), noise.init(trainable)

    return _step(case, device, build)


def not_private(case: Case, device: str) -> JaxStep:
    """The gradient of the mean loss."""
    need_jax()
    import jax

    return _step(case, device, lambda loss, *_: (lambda state, *arguments: (jax.grad(loss)(*arguments), state), ()))


def need_jax() -> None:
    # JAX would take most of the GPU at once, where other processes are as well; it looks here when it is imported.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax_privacy  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name not in ("jax", "jaxlib", "jax_privacy"):
            raise  # something that these need: its name is told
        raise Unavailable("jax-privacy is not installed (pip install 'hush[bench]')") from missing


def used_mib(build: Callable[[], JaxStep]) -> tuple[JaxStep, float]:
    """The step, and the most that JAX's allocator gave out on the GPU at once; to be called in a fresh process.

    Its mark cannot be lowered, and to compile it tries kernels on arrays of their own: where that took more than the
    steps did, theirs is not known, and the compiler's plan is told.
    """
    step, place = build(), _place("cuda")
    compiling = place.memory_stats()["peak_bytes_in_use"]
    step(8)
    highest = place.memory_stats()["peak_bytes_in_use"]
    return step, highest / 2**20 if highest > compiling else step.planned_mib()


def _place(device: str) -> Any:
    import jax

    try:
        return jax.devices("gpu" if device == "cuda" else "cpu")[0]
    except RuntimeError as missing:
        raise Unavailable("jax finds no GPU here (pip install 'jax[cuda13]')") from missing


def _step(case: Case, device: str, build: Callable) -> JaxStep:
    import jax
    import optax

    place = _place(device)
    model, x, y, _ = prepare(case, "cpu")
    trainable, frozen = weights(model, trainable=True), weights(model, trainable=False)
    attends = isinstance(model, Transformer)

    def compiled(attention: str) -> JaxStep:
        logits = partial(network(case.name, attention), kind="bfloat16" if case.autocast else "float32")

        def loss(trainable: Weights, frozen: Weights, x: "Array", y: "Array") -> "Array":
            out = logits(trainable | frozen, x).astype("float32")
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

        gradients, state = build(loss, trainable, len(x))

        def advance(trainable: Weights, state: Any, *fixed: Any) -> tuple[Weights, Any]:
            gradient, state = gradients(state, trainable, *fixed)
            return jax.tree.map(lambda weight, slope: weight - 1e-3 * slope, trainable, gradient), state

        first = jax.device_put((trainable, state), place)
        fixed = jax.device_put((frozen, x.numpy(), y.numpy()), place)
        with jax.default_matmul_precision("default" if case.autocast else "highest"):
            step = jax.jit(advance, donate_argnums=(0, 1)).lower(*first, *fixed).compile()
        versions = f"jax {jax.__version__}, jax-privacy {importlib.metadata.version('jax_privacy')}"
        return JaxStep(step, first, fixed, f"{versions}{f', attention by {attention}' * attends}")

    if device == "cuda" and case.autocast and attends:
        try:
            return compiled("cudnn")  # scores are never written to memory, as in PyTorch
        except Exception as error:  # JAX may not find it; the note says which one was taken
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
    return compiled("xla")


def weights(model: nn.Module, *, trainable: bool) -> Weights:
    """Parameters of a PyTorch model, those of linear layers turned as JAX has them; tied ones come once."""
    turned = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad == trainable}
    return {name: (p.T.contiguous() if name in turned else p).numpy() for name, p in chosen.items()}


def network(name: str, attention: str = "xla") -> Callable[..., "Array"]:
    """The network of a case: from weights, a batch and the type of products to logits."""
    known = {"mlp60": mlp, "mlp784": mlp, "cnn24": convolutional, "wrn16-4": wide_residual}
    known["transformer"] = partial(transformer, heads=4, attention=attention)
    known["gpt2"] = partial(transformer, heads=12, attention=attention)
    kind = "gpt2" if name.startswith("gpt2") else name
    if kind not in known:
        raise Unavailable(f"the network of {name} is not written in JAX here")
    return known[kind]


def mlp(weights: Weights, x: "Array", kind: str) -> "Array":
    return linear(weights, "2", relu(linear(weights, "0", x, kind)), kind)


def convolutional(weights: Weights, x: "Array", kind: str) -> "Array":
    from jax import lax

    square = (1, 1, 2, 2)
    for name in ("0", "3"):
        x = relu(convolution(weights, name, x, kind))
        x = lax.reduce_window(x, -float("inf"), lax.max, square, square, "valid")
    x = x.reshape(len(x), -1)
    for name in ("7", "9"):
        x = relu(linear(weights, name, x, kind))
    return linear(weights, "11", x, kind)


def wide_residual(weights: Weights, x: "Array", kind: str) -> "Array":
    x = convolution(weights, "first", x, kind)
    for at in range(sum(name.endswith("norm1.weight") for name in weights)):
        block = f"blocks.{at}."
        widens = f"{block}shortcut.weight" in weights
        stride = 2 if widens and at else 1
        out = relu(norm(weights, f"{block}norm1", x))
        x = convolution(weights, f"{block}shortcut", out, kind, stride) if widens else x
        out = relu(norm(weights, f"{block}norm2", convolution(weights, f"{block}conv1", out, kind, stride)))
        x = x + convolution(weights, f"{block}conv2", out, kind)
    return linear(weights, "last", relu(norm(weights, "norm", x)).mean((2, 3)), kind)


def transformer(weights: Weights, tokens: "Array", kind: str, *, heads: int, attention: str) -> "Array":
    import jax

    x = weights["words.weight"][tokens] + weights["places.weight"][: tokens.shape[1]]
    for at in range(sum(name.endswith("norm1.weight") for name in weights)):
        block = f"blocks.{at}."
        read = linear(weights, f"{block}attention.read", norm(weights, f"{block}norm1", x), kind)
        query, key, value = (part.reshape(*x.shape[:2], heads, -1) for part in jax.numpy.split(read, 3, axis=-1))
        out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=attention)
        x = x + linear(weights, f"{block}attention.write", out.reshape(x.shape), kind)
        out = linear(weights, f"{block}mix.0", norm(weights, f"{block}norm2", x), kind)
        x = x + linear(weights, f"{block}mix.2", jax.nn.gelu(out, approximate=False), kind)
    tied = {"out.weight": weights["words.weight"].T} if "out.weight" not in weights else {}
    return linear(weights | tied, "out", norm(weights, "norm", x), kind)


def linear(weights: Weights, name: str, x: "Array", kind: str) -> "Array":
    """With the two thin layers of LoRA beside it where there are some."""
    if f"{name}.base.weight" in weights:
        thin = linear(weights, f"{name}.up", linear(weights, f"{name}.down", x, kind), kind)
        return linear(weights, f"{name}.base", x, kind) + thin
    out = x.astype(kind) @ weights[f"{name}.weight"].astype(kind)
    return out + weights[f"{name}.bias"].astype(kind) if f"{name}.bias" in weights else out


def convolution(weights: Weights, name: str, x: "Array", kind: str, stride: int = 1) -> "Array":
    """Of a square and odd kernel, padded so that stride 1 keeps the size; channels first, XLA chooses the layout."""
    from jax import lax

    kernel = weights[f"{name}.weight"].astype(kind)
    side = kernel.shape[-1] // 2
    out = lax.conv_general_dilated(x.astype(kind), kernel, (stride, stride), [(side, side), (side, side)])
    return out + weights[f"{name}.bias"].astype(kind)[:, None, None]


def norm(weights: Weights, name: str, x: "Array") -> "Array":
    """Group norm of 16 groups on images, layer norm on words."""
    from jax.nn import standardize

    x, scale, shift = x.astype("float32"), weights[f"{name}.weight"], weights[f"{name}.bias"]
    if x.ndim == 3:
        return standardize(x) * scale + shift
    grouped = standardize(x.reshape(len(x), 16, -1, *x.shape[2:]), axis=(2, 3, 4))
    return grouped.reshape(x.shape) * scale[:, None, None] + shift[:, None, None]


def relu(x: "Array") -> "Array":
    import jax

    return jax.nn.relu(x)
