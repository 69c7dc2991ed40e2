//! Whether this machine has a driver, and one that is new enough. Nothing here touches a GPU.

use crate::error::Error;
use crate::library::{Library, Version};
use std::ffi::{c_int, c_uint};
use std::fmt;

/// The CUDA that this program speaks to.
const WANTED: Version = Version { major: 13, minor: 0 };
/// The oldest driver that supports it.
pub(crate) const OLDEST_DRIVER: &str = "580";

/// A driver that is new enough; [`Driver::open`] tells what is wrong otherwise.
pub struct Driver {
    version: Version,
    gpus: u32,
    // Stays open: CUDA doesn't come up again in a process that has closed it.
    _library: libloading::Library,
}

impl Driver {
    /// Looks for the driver and asks it for its version and its GPUs.
    pub fn open() -> Result<Driver, Error> {
        let library = Library::Driver.open(&[])?;
        let mut version: c_int = 0;
        // SAFETY: the type is that of cuda.h, and the call writes one number.
        let code = unsafe {
            let call = function::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, "cuDriverGetVersion")?;
            call(&mut version)
        };
        succeeded("cuDriverGetVersion", code)?;
        let version = new_enough(version)?;
        // SAFETY: as above; the call takes flags, of which there are none.
        let code = unsafe {
            let call = function::<unsafe extern "C" fn(c_uint) -> c_int>(&library, "cuInit")?;
            call(0)
        };
        succeeded("cuInit", code)?;
        let mut gpus: c_int = 0;
        // SAFETY: as the first.
        let code = unsafe {
            let call = function::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, "cuDeviceGetCount")?;
            call(&mut gpus)
        };
        succeeded("cuDeviceGetCount", code)?;
        Ok(Driver { version, gpus: gpus as u32, _library: library })
    }

    /// The newest CUDA that it supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// How many GPUs it has.
    pub fn gpus(&self) -> u32 {
        self.gpus
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver(CUDA {}, {} GPUs)", self.version, self.gpus)
    }
}

/// A function of the driver.
///
/// # Safety
/// `F` is its type.
unsafe fn function<F: Copy>(library: &libloading::Library, name: &'static str) -> Result<F, Error> {
    // SAFETY: the type is the caller's promise; the library outlives the call, since `Driver` keeps it.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found
        .map(|symbol| *symbol)
        .map_err(|_| Error::MissingFunction { library: Library::Driver, function: name })
}

/// The version that CUDA writes as 1000 * major + 10 * minor, if it is new enough.
fn new_enough(number: i32) -> Result<Version, Error> {
    let number = number.max(0) as u32;
    let found = Version { major: number / 1000, minor: number % 1000 / 10 };
    if found < WANTED {
        return Err(Error::DriverTooOld { found, wanted: WANTED, driver: OLDEST_DRIVER });
    }
    Ok(found)
}

fn succeeded(call: &'static str, code: i32) -> Result<(), Error> {
    // The numbers of CUresult that a machine's state can bring about.
    let (words, hint) = match code {
        0 => return Ok(()),
        2 => ("out of memory", "another program may hold all of a GPU's memory"),
        3 => ("the driver is shutting down", "start the program again"),
        34 => (
            "a stub library stands in for the driver",
            "take the folder `stubs` of the toolkit out of LD_LIBRARY_PATH",
        ),
        100 => (
            "no GPU that it may use",
            "CUDA_VISIBLE_DEVICES may hide them, and a container needs to be given them (--gpus all)",
        ),
        101 => ("no GPU of that number", "CUDA_VISIBLE_DEVICES may name one that isn't there"),
        802 => ("the system isn't ready", "on machines with NVSwitch, start nvidia-fabricmanager"),
        803 => (
            "the driver's library and its kernel module differ in version",
            "restart the machine after an update of the driver",
        ),
        804 => ("this GPU doesn't support forward compatibility", "remove the package cuda-compat"),
        999 => ("an unknown error", "restarting the machine, or reloading nvidia_uvm, often helps"),
        _ => ("see CUresult in CUDA's manual", "the system's log may say more (`dmesg`)"),
    };
    Err(Error::Driver { call, code, words, hint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_cuda_writes_them() {
        assert_eq!(new_enough(13_000), Ok(Version { major: 13, minor: 0 }));
        assert_eq!(new_enough(13_050), Ok(Version { major: 13, minor: 5 }));
        assert_eq!(new_enough(14_010), Ok(Version { major: 14, minor: 1 }));
        let words = new_enough(12_040).unwrap_err().to_string();
        assert!(["12.4", "13.0", "580", "hint:"].iter().all(|part| words.contains(part)), "{words}");
    }

    #[test]
    fn failures_say_what_was_asked_what_came_and_what_to_do() {
        assert_eq!(succeeded("cuInit", 0), Ok(()));
        for code in [2, 3, 34, 100, 101, 802, 803, 804, 999, 12_345] {
            let words = succeeded("cuInit", code).unwrap_err().to_string();
            let parts = ["cuInit", &code.to_string(), "hint:"];
            assert!(parts.iter().all(|part| words.contains(part)), "{words}");
        }
    }

    #[test]
    fn a_machine_without_a_driver_is_told_what_to_install() {
        match Driver::open() {
            Ok(driver) => assert!(driver.version() >= WANTED, "{driver:?}"),
            Err(error @ Error::NoDriver { .. }) => {
                let words = error.to_string();
                assert!(
                    ["libcuda.so.1", OLDEST_DRIVER, "hint:"].iter().all(|part| words.contains(part)),
                    "{words}"
                );
            }
            Err(error) => assert!(error.to_string().contains("hint:"), "{error}"),
        }
    }
}
