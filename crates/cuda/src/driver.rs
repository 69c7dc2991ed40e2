//! Whether this machine has a driver, and one that is new enough. Nothing here touches a GPU.

use crate::absent::{self, AbsentGpu};
use crate::calls::Calls;
use crate::codes;
use crate::error::Error;
use crate::foreign::{no_library, symbol};
use crate::library::{Library, Version};
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::PathBuf;

/// The CUDA that this program speaks to.
const WANTED: Version = Version { major: 13, minor: 0 };
/// The oldest driver that supports it.
pub(crate) const OLDEST_DRIVER: &str = "580";

/// A driver that is new enough; [`Driver::open`] tells what is wrong otherwise.
pub struct Driver {
    version: Version,
    gpus: u32,
    /// By which number the driver knows the first of them.
    first: c_int,
    calls: Calls,
    // Stays open: CUDA doesn't come up again in a process that has closed it.
    _library: ManuallyDrop<Option<libloading::Library>>,
}

impl Driver {
    /// Looks for the driver, in one of `folders` if it is there, else where the system looks, and asks it for its version and its
    /// GPUs.
    pub fn open(folders: &[PathBuf]) -> Result<Driver, Error> {
        let library = Library::Driver.open(folders)?;
        let mut version: c_int = 0;
        // An older driver may lack functions of the table, and should be called old rather than that.
        // SAFETY: the type is that of cuda.h, and the call writes one number.
        let code = unsafe {
            let call = symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(
                &library,
                Library::Driver,
                "cuDriverGetVersion",
            )?;
            call(&mut version)
        };
        succeeded("cuDriverGetVersion", code)?;
        let version = new_enough(version)?;
        let calls = Calls::find(&library)?;
        // SAFETY: the call takes flags, of which there are none.
        succeeded("cuInit", unsafe { (calls.init)(0) })?;
        let mut gpus: c_int = 0;
        // SAFETY: the call writes one number.
        succeeded("cuDeviceGetCount", unsafe { (calls.device_count)(&mut gpus) })?;
        Ok(Driver { version, gpus: gpus as u32, first: 0, calls, _library: ManuallyDrop::new(Some(library)) })
    }

    /// One of GPUs of a kind that aren't there.
    pub(crate) fn absent(kind: AbsentGpu) -> Driver {
        let (first, calls) = (absent::register(kind), absent::calls());
        Driver { version: WANTED, gpus: u32::MAX, first, calls, _library: no_library() }
    }

    /// By which number the driver knows a GPU.
    pub(crate) fn number(&self, gpu: u32) -> c_int {
        self.first.saturating_add_unsigned(gpu)
    }

    /// The newest CUDA that it supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// How many GPUs it has.
    pub fn gpus(&self) -> u32 {
        self.gpus
    }

    /// What tells its GPUs, or parts of GPUs, from all others, in the order of their numbers: as `GPU-` or `MIG-` and a UUID end,
    /// which [`nvml`](crate::nvml) and `CUDA_VISIBLE_DEVICES` know them by. Their order need not be that of NVML.
    pub fn uuids(&self) -> Result<Vec<String>, Error> {
        (0..self.gpus as c_int).map(|number| self.uuid(number)).collect()
    }

    fn uuid(&self, number: c_int) -> Result<String, Error> {
        let (mut device, mut bytes) = (0, [0; 16]);
        // SAFETY: the call writes one number.
        succeeded("cuDeviceGet", unsafe { (self.calls.device)(&mut device, number) })?;
        // SAFETY: the device is one that the driver just gave; the call writes as many bytes.
        succeeded("cuDeviceGetUuid", unsafe { (self.calls.device_uuid)(&mut bytes, device) })?;
        Ok(uuid(bytes))
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver(CUDA {}, {} GPUs)", self.version, self.gpus)
    }
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

/// As UUIDs are written.
fn uuid(bytes: [u8; 16]) -> String {
    let hyphen = |i: usize| if [4, 6, 8, 10].contains(&i) { "-" } else { "" };
    bytes.iter().enumerate().map(|(i, byte)| format!("{}{byte:02x}", hyphen(i))).collect()
}

fn succeeded(call: &'static str, code: i32) -> Result<(), Error> {
    if code == 0 {
        return Ok(());
    }
    let unknown = ("see CUresult in CUDA's manual", codes::UNKNOWN_HINT);
    let (words, hint) = codes::meaning(code).unwrap_or(unknown);
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
    fn uuids_are_written_as_everywhere() {
        let bytes = std::array::from_fn(|i| 0xa0 + i as u8);
        assert_eq!(uuid(bytes), "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
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
        match Driver::open(&[]) {
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
