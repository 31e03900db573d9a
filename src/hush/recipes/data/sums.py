"""sha256 of what each file holds. For gzip files it is that of the content, so that any compression of it will do."""

import hashlib
from pathlib import Path

from hush.recipes.data.errors import DataError

IDX = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    "fashion-mnist": {
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}
PACKED = {
    "cifar10": {
        "train-1.xz": "afbedd1e98d33823840128076cb8a4f2e9548fcc845608ca255c513d221642c0",
        "train-2.xz": "1d665d87dad892afd19f1a305adb45d43c004b1d5bc200ccd9dafa8dfc2d6b73",
        "train-3.xz": "2a4d9429968665d6f9fd50663b71023fcc40e299498f2996cc2875d670619611",
        "train-4.xz": "cd36a1dd75e8b473afb6ce1b698d7127a5bbb44468ea6cbe6e42a8031b8405fa",
        "train-5.xz": "ec6dda4019a162163a077ca1548dcd3b29e4a51913f8b919e9684082b4c7dcb5",
        "test.xz": "1b2038aaad96da6dd1a2aa15fcb4f5e3a7eb553d16761a2db945d49784dc3400",
    },
    "cifar100": {
        "train-1.xz": "5493bf113f2106b57727081d1c1975500b97fff1da238ea006330d50ff2e7732",
        "train-2.xz": "07452cdc286bbe9eac2a6b167dc955878f89908c188c955ca36c328a2bfe1706",
        "train-3.xz": "f720f6f7de833f8e17190a28b506b67f6e8925bf91c677a65d22e12a87d756d1",
        "train-4.xz": "4eca61eae863614a1e003dec6fd8884bc93d393add8f99a39bb8fb9efda79824",
        "train-5.xz": "7785d69281faa57934d24ef1f7daa7f5f1433e89b5a2c57d691d699007efb79d",
        "test.xz": "df45436c0fb0298e2baa1878e8ce6b92a9c3ea9a3b1e8b6f2d5ea2b05b93238e",
    },
}
ARCHIVE = {
    "cifar10": {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    "cifar100": {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
}


def check(content: bytes, expected: str, path: Path) -> bytes:
    """The content, if its sha256 is the expected one; otherwise refused."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is damaged or not the original: sha256 of its content is {found}, expected {expected}; "
            "delete the file and fetch it again"
        )
    return content
