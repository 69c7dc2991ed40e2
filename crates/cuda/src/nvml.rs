//! NVML: which GPUs a machine has, how busy they are, and whose processes are on them: what `nvidia-smi` shows.
//!
//! It sees all GPUs of the machine, whatever `CUDA_VISIBLE_DEVICES` says, numbers them by their place on the bus, and touches
//! none. [`Driver::uuids`](crate::Driver::uuids) tells which of them a program sees, and by which numbers.

mod foreign;

use crate::error::Error;
use crate::library::Library;
use foreign::{Device, Functions, Status};
use std::ffi::{CStr, c_char, c_uint};
use std::fmt;
use std::path::PathBuf;

/// The library, opened and ready.
pub struct Nvml {
    functions: Functions,
}

/// A GPU at one moment. What it can't measure, or doesn't tell this user, is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// What NVIDIA calls it.
    pub name: String,
    /// What tells it from all others: `GPU-` and a UUID.
    pub uuid: String,
    /// Its memory, that of its parts together where it is cut into some.
    pub memory: Option<Used>,
    /// In how many percent of the last moments a kernel ran. Parts have none.
    pub busy_percent: Option<u32>,
    /// What it draws, in thousandths of a watt.
    pub power_mw: Option<u32>,
    /// The most that it may draw, in the same.
    pub power_limit_mw: Option<u32>,
    /// In degrees centigrade.
    pub temperature_c: Option<u32>,
    /// Processes that compute on it, of all users. In a container their numbers may be those of the host. Where it is cut into parts
    /// the driver may tell who is on all of them to administrators only, and each part tells its own.
    pub processes: Option<Vec<Process>>,
    /// The parts that it is cut into (MIG).
    pub parts: Vec<Part>,
}

/// A part of a GPU, which is a GPU to programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What NVIDIA calls it.
    pub name: String,
    /// What tells it from all others: `MIG-` and a UUID.
    pub uuid: String,
    /// Its memory.
    pub memory: Option<Used>,
    /// Processes that compute on it.
    pub processes: Option<Vec<Process>>,
}

/// How much of a memory is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Bytes in use, by whomever.
    pub used: u64,
    /// All bytes.
    pub total: u64,
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// What it holds of the GPU's memory.
    pub bytes: Option<u64>,
}

/// The library's names have at most so many bytes, the 0 at the end among them.
const NAME_BYTES: usize = 96;
/// How often the list of processes is asked for again because it has grown meanwhile.
const MOST_TRIES: usize = 5;

impl Nvml {
    /// Opens it: from one of `folders` if it is there, else from where the system looks. Fails where there is none, or the driver
    /// isn't loaded, and says what to do.
    pub fn open(folders: &[PathBuf]) -> Result<Nvml, Error> {
        let functions = Functions::open(folders)?;
        // SAFETY: the call takes nothing.
        let status = unsafe { (functions.init)() };
        functions.succeeded("nvmlInit", status, || "making it ready".to_owned())?;
        Ok(Nvml { functions })
    }

    /// The driver's version, as in 580.65.06.
    pub fn driver_version(&self) -> Result<String, Error> {
        let about = || "the driver's version".to_owned();
        // SAFETY: the call writes no more bytes than it is told of.
        self.text("nvmlSystemGetDriverVersion", about, |to, room| unsafe {
            (self.functions.driver_version)(to, room)
        })
    }

    /// How every GPU is at the moment, in NVML's order. One that has failed has an error, and the others don't.
    pub fn look(&self) -> Result<Vec<Result<State, Error>>, Error> {
        let mut count = 0;
        // SAFETY: the call writes one number.
        let status = unsafe { (self.functions.count)(&mut count) };
        self.functions.succeeded("nvmlDeviceGetCount", status, || "how many GPUs there are".to_owned())?;
        Ok((0..count).map(|index| self.state(index)).collect())
    }

    fn state(&self, index: u32) -> Result<State, Error> {
        let mut device = std::ptr::null_mut();
        // SAFETY: the call writes one handle.
        let status = unsafe { (self.functions.by_index)(index, &mut device) };
        self.functions.succeeded("nvmlDeviceGetHandleByIndex", status, || format!("GPU {index}"))?;
        let one = One { functions: &self.functions, device, index };
        let functions = &self.functions;
        // SAFETY: each of these takes a handle that the library has just given, and writes one number or struct.
        let (busy, power, limit, temperature) = unsafe {
            (
                one.get("nvmlDeviceGetUtilizationRates", functions.utilization)?,
                one.get("nvmlDeviceGetPowerUsage", functions.power)?,
                one.get("nvmlDeviceGetEnforcedPowerLimit", functions.power_limit)?,
                one.got("nvmlDeviceGetTemperature", |to| {
                    (functions.temperature)(device, foreign::GPU_SENSOR, to)
                })?,
            )
        };
        Ok(State {
            name: self.name(&one)?,
            uuid: self.uuid(&one)?,
            memory: one.memory()?,
            busy_percent: busy.map(|busy| busy.gpu),
            power_mw: power,
            power_limit_mw: limit,
            temperature_c: temperature,
            processes: one.processes()?,
            parts: self.parts(&one)?,
        })
    }

    fn name(&self, one: &One<'_>) -> Result<String, Error> {
        // SAFETY: the handle is the library's, and the call writes no more bytes than it is told of.
        self.text(
            "nvmlDeviceGetName",
            || one.about(),
            |to, room| unsafe { (self.functions.name)(one.device, to, room) },
        )
    }

    fn uuid(&self, one: &One<'_>) -> Result<String, Error> {
        // SAFETY: as above.
        self.text(
            "nvmlDeviceGetUUID",
            || one.about(),
            |to, room| unsafe { (self.functions.uuid)(one.device, to, room) },
        )
    }

    /// The parts that a GPU is cut into. Most GPUs can't be.
    fn parts(&self, whole: &One<'_>) -> Result<Vec<Part>, Error> {
        let (mut now, mut pending, mut most) = (0, 0, 0);
        // SAFETY: the handle is the library's, and the call writes two numbers.
        let status = unsafe { (self.functions.mig_mode)(whole.device, &mut now, &mut pending) };
        if whole.told("nvmlDeviceGetMigMode", status)?.is_none() || now != foreign::MIG_ENABLED as c_uint {
            return Ok(Vec::new());
        }
        // SAFETY: as above, with one number.
        let status = unsafe { (self.functions.most_parts)(whole.device, &mut most) };
        whole.told("nvmlDeviceGetMaxMigDeviceCount", status)?;
        let part = |place| {
            let mut device = std::ptr::null_mut();
            // SAFETY: as above; the call writes one handle.
            let status = unsafe { (self.functions.part)(whole.device, place, &mut device) };
            // Places may be empty.
            if whole.told("nvmlDeviceGetMigDeviceHandleByIndex", status)?.is_none() {
                return Ok(None);
            }
            let part = One { device, ..*whole };
            Ok(Some(Part {
                name: self.name(&part)?,
                uuid: self.uuid(&part)?,
                memory: part.memory()?,
                processes: part.processes()?,
            }))
        };
        (0..most).filter_map(|place| part(place).transpose()).collect()
    }

    fn text(
        &self,
        call: &'static str,
        about: impl Fn() -> String,
        write: impl FnOnce(*mut c_char, c_uint) -> Status,
    ) -> Result<String, Error> {
        let mut bytes = [0; NAME_BYTES];
        let status = write(bytes.as_mut_ptr(), NAME_BYTES as c_uint - 1);
        self.functions.succeeded(call, status, about)?;
        // SAFETY: the last byte was 0 before the call, which didn't know of it.
        Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: made ready in `open`; nobody asks any more. A failure leaves nothing to be done.
        unsafe { (self.functions.shutdown)() };
    }
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nvml(driver {:?})", self.driver_version())
    }
}

/// One GPU, or part of one, while it is asked.
#[derive(Clone, Copy)]
struct One<'a> {
    functions: &'a Functions,
    device: Device,
    index: u32,
}

impl One<'_> {
    fn about(&self) -> String {
        format!("GPU {}", self.index)
    }

    /// None where the GPU has no such thing, or tells it to others only.
    fn told(&self, call: &'static str, status: Status) -> Result<Option<()>, Error> {
        match status {
            foreign::NOT_SUPPORTED | foreign::NO_PERMISSION | foreign::NOT_FOUND => Ok(None),
            status => self.functions.succeeded(call, status, || self.about()).map(Some),
        }
    }

    fn got<T: Default>(
        &self,
        call: &'static str,
        ask: impl FnOnce(*mut T) -> Status,
    ) -> Result<Option<T>, Error> {
        let mut value = T::default();
        let status = ask(&mut value);
        Ok(self.told(call, status)?.map(|()| value))
    }

    /// # Safety
    /// The function takes a handle of the library's and writes one `T`.
    unsafe fn get<T: Default>(
        &self,
        call: &'static str,
        ask: unsafe extern "C" fn(Device, *mut T) -> Status,
    ) -> Result<Option<T>, Error> {
        // SAFETY: the caller's promise; the handle is the library's.
        self.got(call, |to| unsafe { ask(self.device, to) })
    }

    fn memory(&self) -> Result<Option<Used>, Error> {
        // SAFETY: the call writes the struct of nvml.h.
        let memory = unsafe { self.get("nvmlDeviceGetMemoryInfo", self.functions.memory) }?;
        Ok(memory.map(|memory| Used { used: memory.used, total: memory.total }))
    }

    fn processes(&self) -> Result<Option<Vec<Process>>, Error> {
        let call = "nvmlDeviceGetComputeRunningProcesses";
        let mut found = vec![foreign::Process::default(); 16];
        for _ in 0..MOST_TRIES {
            let mut count = found.len() as c_uint;
            // SAFETY: the handle is the library's; the call writes at most as many structs as it is told that there are, and one
            // number.
            let status = unsafe { (self.functions.processes)(self.device, &mut count, found.as_mut_ptr()) };
            if status == foreign::INSUFFICIENT_SIZE {
                // Others may come until it is asked again.
                found.resize(count as usize + 16, foreign::Process::default());
                continue;
            }
            if self.told(call, status)?.is_none() {
                return Ok(None);
            }
            found.truncate(count as usize);
            let known = |bytes| (bytes != foreign::NOT_AVAILABLE).then_some(bytes);
            return Ok(Some(found.iter().map(|p| Process { pid: p.pid, bytes: known(p.bytes) }).collect()));
        }
        self.functions.succeeded(call, foreign::INSUFFICIENT_SIZE, || self.about())?;
        Ok(None)
    }
}

impl Functions {
    fn succeeded(
        &self,
        call: &'static str,
        status: Status,
        what: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        if status == foreign::SUCCESS {
            return Ok(());
        }
        // SAFETY: the call gives a constant string that ends in 0.
        let words = unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned();
        let hint = match status {
            foreign::DRIVER_NOT_LOADED => {
                "the driver's module isn't loaded: `modprobe nvidia`, or install the driver for this kernel"
            }
            foreign::VERSION_MISMATCH => "the driver was updated since the machine started: start it again",
            foreign::GPU_IS_LOST => {
                "the GPU has left the bus: `dmesg` may say why; the machine wants a new start"
            }
            foreign::RESET_REQUIRED => {
                "the GPU wants a reset: `nvidia-smi --gpu-reset`, or start the machine again"
            }
            _ => "`nvidia-smi` asks the same library, and may tell more",
        };
        let status = format!("nvmlReturn_t {status}");
        Err(Error::LibraryCall { library: Library::Nvml, call, what: what(), status, words, hint })
    }
}
