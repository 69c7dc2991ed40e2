//! NVIDIA's libraries: how they are called, who brings them, and how they are found.

use crate::error::Error;
use std::fmt;
use std::path::PathBuf;

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 13 of 13.0.
    pub major: u32,
    /// 0 of 13.0.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One of the libraries that are opened at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// The driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Convolutions and batch norms.
    Cudnn,
    /// Collectives between GPUs.
    Nccl,
    /// What GPUs are busy with.
    Nvml,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 6] =
        [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Cudnn, Library::Nccl, Library::Nvml];

    /// What people call it.
    pub const fn name(self) -> &'static str {
        match self {
            Library::Driver => "the NVIDIA driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Cudnn => "cuDNN",
            Library::Nccl => "NCCL",
            Library::Nvml => "NVML",
        }
    }

    /// The names of its file, the surest first. The driver's comes with the driver alone; without a number a name is only there
    /// for those who develop.
    pub const fn files(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1", "libcuda.so"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
            Library::Cudnn => &["libcudnn.so.9", "libcudnn.so"],
            Library::Nccl => &["libnccl.so.2", "libnccl.so"],
            Library::Nvml => &["libnvidia-ml.so.1", "libnvidia-ml.so"],
        }
    }

    /// Which packages bring it.
    pub const fn packages(self) -> &'static str {
        match self {
            Library::Driver => {
                "install the driver (Ubuntu: nvidia-driver-580 or later; elsewhere NVIDIA's repository)"
            }
            Library::Nvrtc => {
                "install it with the package cuda-nvrtc-13-0 of NVIDIA's repository, or with `pip install nvidia-cuda-nvrtc` and its folder in LD_LIBRARY_PATH"
            }
            Library::CublasLt => {
                "install it with the package libcublas-13-0 of NVIDIA's repository, or with `pip install nvidia-cublas` and its folder in LD_LIBRARY_PATH"
            }
            Library::Cudnn => {
                "install it with the package libcudnn9-cuda-13 of NVIDIA's repository, or with `pip install nvidia-cudnn-cu13` and its folder in LD_LIBRARY_PATH"
            }
            Library::Nccl => {
                "install it with the package libnccl2 of NVIDIA's repository, or with `pip install nvidia-nccl-cu13` and its folder in LD_LIBRARY_PATH"
            }
            Library::Nvml => {
                "it comes with the NVIDIA driver; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            }
        }
    }

    /// Opens it: from one of `folders` if it is there, else from where the system looks.
    pub(crate) fn open(self, folders: &[PathBuf]) -> Result<libloading::Library, Error> {
        let of_folders =
            folders.iter().flat_map(|folder| self.files().iter().map(move |file| folder.join(file)));
        let of_system = self.files().iter().map(PathBuf::from);
        let mut tried = Vec::new();
        for path in of_folders.filter(|path| path.exists()).chain(of_system) {
            // SAFETY: NVIDIA's libraries run only their own start, which relies on nothing of ours; that the file is one is up to
            // whoever installed it under that name.
            match unsafe { libloading::Library::new(&path) } {
                Ok(library) => return Ok(library),
                Err(error) => tried.push(cause(&error)),
            }
        }
        let tried = tried.join("; ");
        Err(match self {
            Library::Driver => Error::NoDriver { tried, wanted: crate::driver::OLDEST_DRIVER },
            _ => Error::MissingLibrary { library: self, tried },
        })
    }
}

/// What the system says of a library that it can't open.
fn cause(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_itself_what_was_tried_and_its_package() {
        let missing = |library: Library| {
            let tried = format!("{}: cannot open shared object file", library.files()[0]);
            Error::MissingLibrary { library, tried }.to_string()
        };
        for (library, package) in [
            (Library::Nvrtc, "nvidia-cuda-nvrtc"),
            (Library::CublasLt, "nvidia-cublas"),
            (Library::Cudnn, "nvidia-cudnn-cu13"),
            (Library::Nccl, "nvidia-nccl-cu13"),
            (Library::Nvml, "the NVIDIA driver"),
        ] {
            let words = missing(library);
            for part in [library.name(), library.files()[0], package, "hint:"] {
                assert!(words.contains(part), "{part} isn't in {words}");
            }
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let folder = std::env::temp_dir().join(format!("phalanx-no-library-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(Library::Nccl.files()[0]);
        std::fs::write(&file, "no library").unwrap();
        // Where the system has the real one, that is opened instead.
        if let Err(error) = Library::Nccl.open(std::slice::from_ref(&folder)) {
            assert!(error.to_string().contains(file.to_str().unwrap()), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
