//! What of nvml.h is called.

use crate::foreign::{constants, functions};
use crate::library::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) type Status = c_int;
pub(crate) type Device = *mut c_void;
pub(crate) type Sensor = c_int;

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// Of the last second or so, the share in percent in which a kernel ran, and in which memory was read or written.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Utilization {
    pub(crate) gpu: c_uint,
    pub(crate) memory: c_uint,
}

/// A process that has a context on a GPU.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Process {
    pub(crate) pid: c_uint,
    pub(crate) bytes: u64,
    pub(crate) gpu_instance: c_uint,
    pub(crate) compute_instance: c_uint,
}

functions! {
    /// The functions of NVML.
    Functions of Library::Nvml;
    init "nvmlInit_v2" () -> Status;
    shutdown "nvmlShutdown" () -> Status;
    error_string "nvmlErrorString" (Status) -> *const c_char;
    driver_version "nvmlSystemGetDriverVersion" (*mut c_char, c_uint) -> Status;
    count "nvmlDeviceGetCount_v2" (*mut c_uint) -> Status;
    by_index "nvmlDeviceGetHandleByIndex_v2" (c_uint, *mut Device) -> Status;
    name "nvmlDeviceGetName" (Device, *mut c_char, c_uint) -> Status;
    uuid "nvmlDeviceGetUUID" (Device, *mut c_char, c_uint) -> Status;
    memory "nvmlDeviceGetMemoryInfo" (Device, *mut Memory) -> Status;
    utilization "nvmlDeviceGetUtilizationRates" (Device, *mut Utilization) -> Status;
    power "nvmlDeviceGetPowerUsage" (Device, *mut c_uint) -> Status;
    power_limit "nvmlDeviceGetEnforcedPowerLimit" (Device, *mut c_uint) -> Status;
    temperature "nvmlDeviceGetTemperature" (Device, Sensor, *mut c_uint) -> Status;
    processes "nvmlDeviceGetComputeRunningProcesses_v3" (Device, *mut c_uint, *mut Process) -> Status;
    mig_mode "nvmlDeviceGetMigMode" (Device, *mut c_uint, *mut c_uint) -> Status;
    most_parts "nvmlDeviceGetMaxMigDeviceCount" (Device, *mut c_uint) -> Status;
    part "nvmlDeviceGetMigDeviceHandleByIndex" (Device, c_uint, *mut Device) -> Status;
}

constants! {
    SUCCESS "NVML_SUCCESS" 0;
    NOT_SUPPORTED "NVML_ERROR_NOT_SUPPORTED" 3;
    NO_PERMISSION "NVML_ERROR_NO_PERMISSION" 4;
    NOT_FOUND "NVML_ERROR_NOT_FOUND" 6;
    INSUFFICIENT_SIZE "NVML_ERROR_INSUFFICIENT_SIZE" 7;
    DRIVER_NOT_LOADED "NVML_ERROR_DRIVER_NOT_LOADED" 9;
    GPU_IS_LOST "NVML_ERROR_GPU_IS_LOST" 15;
    RESET_REQUIRED "NVML_ERROR_RESET_REQUIRED" 16;
    VERSION_MISMATCH "NVML_ERROR_LIB_RM_VERSION_MISMATCH" 18;

    GPU_SENSOR "NVML_TEMPERATURE_GPU" 0;
    MIG_ENABLED "NVML_DEVICE_MIG_ENABLE" 1;
}

/// What the library writes for memory that it may not tell, `NVML_VALUE_NOT_AVAILABLE`.
pub(crate) const NOT_AVAILABLE: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::headers::check;
    use std::mem::offset_of;

    #[test]
    fn it_is_as_the_header_says() {
        let names = [
            ("Status", "nvmlReturn_t"),
            ("Device", "nvmlDevice_t"),
            ("Sensor", "nvmlTemperatureSensors_t"),
            ("Memory", "nvmlMemory_t"),
            ("Utilization", "nvmlUtilization_t"),
            ("Process", "nvmlProcessInfo_t"),
        ];
        let mut more: String = [
            ("nvmlMemory_t", size_of::<Memory>()),
            ("nvmlUtilization_t", size_of::<Utilization>()),
            ("nvmlProcessInfo_t", size_of::<Process>()),
        ]
        .iter()
        .map(|(name, bytes)| format!("static_assert(sizeof({name}) == {bytes}, \"{name}\");\n"))
        .collect();
        more.extend(
            [
                ("nvmlMemory_t", "total", offset_of!(Memory, total)),
                ("nvmlMemory_t", "free", offset_of!(Memory, free)),
                ("nvmlMemory_t", "used", offset_of!(Memory, used)),
                ("nvmlUtilization_t", "gpu", offset_of!(Utilization, gpu)),
                ("nvmlProcessInfo_t", "pid", offset_of!(Process, pid)),
                ("nvmlProcessInfo_t", "usedGpuMemory", offset_of!(Process, bytes)),
                ("nvmlProcessInfo_t", "gpuInstanceId", offset_of!(Process, gpu_instance)),
            ]
            .iter()
            .map(|(of, field, bytes)| {
                format!("static_assert(offsetof({of}, {field}) == {bytes}, \"{field}\");\n")
            }),
        );
        more += "static_assert((unsigned long long)NVML_VALUE_NOT_AVAILABLE == ~0ull, \"not available\");\n";
        check("nvml.h", Functions::TABLE, TABLE, &names, &more);
    }
}
