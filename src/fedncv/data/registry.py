"""The datasets by name: description, sources of their files, and the function that reads them.

To add a dataset, add one entry here and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedncv.data.cifar import CIFAR10_FILES, CIFAR100_FILES, read_cifar10, read_cifar100
from fedncv.data.dataset import Dataset
from fedncv.data.digits import read_digits
from fedncv.data.folder import read_cinic10, read_tiny_imagenet
from fedncv.data.idx import MNIST_FILES, emnist_files, read_emnist, read_mnist
from fedncv.data.raw import Raw
from fedncv.data.svhn import EXTRA_FILES, FILES, read_svhn
from fedncv.data.synthetic import load_synthetic
from fedncv.data.text import FILE, load_shakespeare

ORIGINALS = "read from the original files, checksums and counts correct, 2026-11-16"
FORMAT = "reader tested on small files of the same format; original files not tested, 2026-11-16"


class Hub(NamedTuple):
    """Location of a dataset on the Hugging Face hub. The ids have not been tried; the first use checks shape, labels
    and number of images, as for any other file."""

    id: str
    config: str | None = None
    splits: tuple[str, ...] = ("train", "test")  # pooled in this order
    label: str = "label"  # column; the picture's column is found by its type
    files: bool = False  # the repository holds the original files themselves


def no_pictures(_folder: Path) -> Iterator[Raw]:
    raise AssertionError("a dataset that is not of pictures has ``make``")


class Entry(NamedTuple):
    title: str
    description: str  # one line
    year: int
    shape: tuple[int, ...]  # channels, height, width; of a text its length, otherwise the number of features
    num_classes: int
    num_images: int  # samples; those with the default knobs
    read: Callable[[Path], Iterator[Raw]] = no_pictures  # from the folder that holds ``files``
    make: Callable[..., Dataset] | None = None  # or, if it is not of pictures, the dataset: folder, knobs -> Dataset
    files: tuple[str, ...] = ()  # files or folders, a .gz also decompressed; none: built in
    folders: tuple[str, ...] = ()  # possible locations below the data folder
    archives: tuple[str, ...] = ()  # or possible archives of them
    md5: Mapping[str, str] = {}  # published checksums, of files and archives
    hub: Hub | None = None
    home: str = ""
    checked: str = FORMAT  # what was verified, and when


MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    # the same files decompressed, so that MNIST is never mistaken for Fashion-MNIST
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
CIFAR10_MD5 = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR100_MD5 = {
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}
SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    "extra_32x32.mat": "a93ce644f1a588dc4d68dda5feec44a7",
}
EMNIST_MD5 = {"gzip.zip": "58c8d27c78d21e728a6bc7b3cc06412e"}
EMNIST_FOLDERS = ("EMNIST/raw", "EMNIST/raw/gzip", "EMNIST", "EMNIST/gzip", "emnist", "gzip", ".")


DATASETS: Mapping[str, Entry] = {
    "digits": Entry(
        title="digits",
        description="Handwritten digits of 8x8, enlarged to 28x28; built in",
        year=1998,
        shape=(1, 28, 28),
        num_classes=10,
        num_images=1_797,
        read=read_digits,
        home="https://archive.ics.uci.edu/dataset/80",
        checked="part of scikit-learn, tested at every change",
    ),
    "synthetic": Entry(
        title="Synthetic(1, 1)",
        description="Drawn by a formula, any number of clients, who are owners; built in",
        year=2020,
        shape=(60,),
        num_classes=10,
        num_images=10_000,
        make=load_synthetic,
        home="https://arxiv.org/abs/1812.06127",
        checked="drawn on this machine, tested at every change",
    ),
    "mnist": Entry(
        title="MNIST",
        description="Handwritten digits",
        year=1998,
        shape=(1, 28, 28),
        num_classes=10,
        num_images=70_000,
        read=read_mnist,
        files=MNIST_FILES,
        folders=("MNIST/raw", "MNIST", "mnist", "mnist/raw", "."),
        md5=MNIST_MD5,
        hub=Hub("ylecun/mnist"),
        home="http://yann.lecun.com/exdb/mnist/",
        checked=ORIGINALS,
    ),
    "fashion_mnist": Entry(
        title="Fashion-MNIST",
        description="Articles of clothing",
        year=2017,
        shape=(1, 28, 28),
        num_classes=10,
        num_images=70_000,
        read=read_mnist,
        files=MNIST_FILES,
        folders=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion_mnist", "."),
        md5=FASHION_MNIST_MD5,
        hub=Hub("zalando-datasets/fashion_mnist"),
        home="https://github.com/zalandoresearch/fashion-mnist",
        checked=ORIGINALS,
    ),
    "emnist": Entry(
        title="EMNIST (byclass)",
        description="Handwritten digits, capital and small letters",
        year=2017,
        shape=(1, 28, 28),
        num_classes=62,
        num_images=814_255,
        read=partial(read_emnist, subset="byclass"),
        files=emnist_files("byclass"),
        folders=EMNIST_FOLDERS,
        archives=("EMNIST/raw/gzip.zip", "EMNIST/gzip.zip", "gzip.zip"),
        md5=EMNIST_MD5,
        hub=Hub("Royc30ne/emnist-byclass", files=True),
        home="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "emnist_balanced": Entry(
        title="EMNIST (balanced)",
        description="Digits and letters, the same number of each, similar ones merged",
        year=2017,
        shape=(1, 28, 28),
        num_classes=47,
        num_images=131_600,
        read=partial(read_emnist, subset="balanced"),
        files=emnist_files("balanced"),
        folders=EMNIST_FOLDERS,
        archives=("EMNIST/raw/gzip.zip", "EMNIST/gzip.zip", "gzip.zip"),
        md5=EMNIST_MD5,
        hub=Hub("Royc30ne/emnist-balanced", files=True),
        home="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "emnist_letters": Entry(
        title="EMNIST (letters)",
        description="Letters, capital and small together",
        year=2017,
        shape=(1, 28, 28),
        num_classes=26,
        num_images=145_600,
        read=partial(read_emnist, subset="letters", first_label=1),
        files=emnist_files("letters"),
        folders=EMNIST_FOLDERS,
        archives=("EMNIST/raw/gzip.zip", "EMNIST/gzip.zip", "gzip.zip"),
        md5=EMNIST_MD5,
        hub=Hub("Royc30ne/emnist-letters", files=True),
        home="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    ),
    "cifar10": Entry(
        title="CIFAR-10",
        description="Photographs of ten kinds of animals and vehicles",
        year=2009,
        shape=(3, 32, 32),
        num_classes=10,
        num_images=60_000,
        read=read_cifar10,
        files=CIFAR10_FILES,
        folders=("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "CIFAR10/cifar-10-batches-py", "."),
        archives=("cifar-10-python.tar.gz", "cifar10/cifar-10-python.tar.gz"),
        md5=CIFAR10_MD5,
        hub=Hub("uoft-cs/cifar10"),
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        checked=ORIGINALS,
    ),
    "cifar100": Entry(
        title="CIFAR-100",
        description="Photographs of a hundred kinds of things, the fine classes",
        year=2009,
        shape=(3, 32, 32),
        num_classes=100,
        num_images=60_000,
        read=read_cifar100,
        files=CIFAR100_FILES,
        folders=("cifar-100-python", "cifar100/cifar-100-python", "CIFAR100/cifar-100-python"),
        archives=("cifar-100-python.tar.gz", "cifar100/cifar-100-python.tar.gz"),
        md5=CIFAR100_MD5,
        hub=Hub("uoft-cs/cifar100", label="fine_label"),
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "svhn": Entry(
        title="SVHN",
        description="Street view house numbers, cropped digits",
        year=2011,
        shape=(3, 32, 32),
        num_classes=10,
        num_images=99_289,
        read=read_svhn,
        files=FILES,
        folders=("SVHN", "svhn", "."),
        md5=SVHN_MD5,
        hub=Hub("ufldl-stanford/svhn", config="cropped_digits"),
        home="http://ufldl.stanford.edu/housenumbers/",
    ),
    "svhn_extra": Entry(
        title="SVHN with extra",
        description="Street view house numbers with the 531,131 easier ones",
        year=2011,
        shape=(3, 32, 32),
        num_classes=10,
        num_images=630_420,
        read=partial(read_svhn, extra=True),
        files=EXTRA_FILES,
        folders=("SVHN", "svhn", "."),
        md5=SVHN_MD5,
        hub=Hub("ufldl-stanford/svhn", config="cropped_digits", splits=("train", "test", "extra")),
        home="http://ufldl.stanford.edu/housenumbers/",
    ),
    "tiny_imagenet": Entry(
        title="Tiny-ImageNet",
        description="Photographs of 200 kinds of things, without the unlabelled test images",
        year=2015,
        shape=(3, 64, 64),
        num_classes=200,
        num_images=110_000,
        read=read_tiny_imagenet,
        files=("train", "val"),
        folders=("tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet/tiny-imagenet-200"),
        archives=("tiny-imagenet-200.zip",),
        md5={"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
        hub=Hub("zh-plus/tiny-imagenet", splits=("train", "valid")),
        home="http://cs231n.stanford.edu/",
    ),
    "cinic10": Entry(
        title="CINIC-10",
        description="CIFAR-10 and downsized ImageNet photographs of the same ten kinds",
        year=2018,
        shape=(3, 32, 32),
        num_classes=10,
        num_images=270_000,
        read=read_cinic10,
        files=("train/airplane", "valid/airplane", "test/airplane"),
        folders=("CINIC-10", "cinic-10", "cinic10", "CINIC10", "."),
        archives=("CINIC-10.tar.gz", "cinic10/CINIC-10.tar.gz"),
        md5={"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
        hub=Hub("flwrlabs/cinic10", splits=("train", "validation", "test")),
        home="https://doi.org/10.7488/ds/2448",
    ),
    "shakespeare": Entry(
        title="Shakespeare",
        description="Plays by speaker: 80 characters and the next one; speakers are owners",
        year=2015,
        shape=(80,),
        num_classes=80,
        num_images=96_574,
        make=load_shakespeare,
        files=(FILE,),
        folders=(".", "shakespeare"),
        home="https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare",
        checked="read from the whole file (1,115,394 characters, input.txt renamed), 2026-11-17",
    ),
}
