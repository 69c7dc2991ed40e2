//! The functions of the driver, found once. Types and names are those of cuda.h: a function that was changed has the suffix `_v2`.

use crate::error::Error;
use crate::foreign::symbol;
use crate::library::Library;
use std::ffi::{CStr, c_char, c_float, c_int, c_uchar, c_uint, c_ulonglong, c_void};

/// A CUresult.
pub(crate) type Code = c_int;
/// A pointer of the driver's, which we only hand back.
pub(crate) type Handle = *mut c_void;

/// One row a function: the field, the driver's name and the types.
macro_rules! calls {
    ($($field:ident $name:literal ($($parameter:ty),*);)*) => {
        /// The functions of the driver. Calling one is unsafe: handles must be alive, pointers must lead to what cuda.h says.
        pub(crate) struct Calls {
            $(pub(crate) $field: unsafe extern "C" fn($($parameter),*) -> Code,)*
        }

        impl Calls {
            /// Finds all of them.
            pub(crate) fn find(library: &libloading::Library) -> Result<Calls, Error> {
                // SAFETY: the types are those of cuda.h; `Driver`, which keeps this, never closes the library.
                unsafe { Ok(Calls { $($field: symbol(library, Library::Driver, $name)?,)* }) }
            }
        }
    };
}

calls! {
    init "cuInit" (c_uint);
    error_name "cuGetErrorName" (Code, *mut *const c_char);
    error_string "cuGetErrorString" (Code, *mut *const c_char);
    device_count "cuDeviceGetCount" (*mut c_int);
    device "cuDeviceGet" (*mut c_int, c_int);
    device_name "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_uuid "cuDeviceGetUuid_v2" (*mut [u8; 16], c_int);
    device_bus "cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_attribute "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_retain "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    context_release "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set "cuCtxSetCurrent" (Handle);
    context_synchronize "cuCtxSynchronize" ();
    priorities "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    memory_info "cuMemGetInfo_v2" (*mut usize, *mut usize);
    memory_alloc "cuMemAlloc_v2" (*mut u64, usize);
    memory_free "cuMemFree_v2" (u64);
    host_alloc "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free "cuMemFreeHost" (*mut c_void);
    copy_up "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    copy_down "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
    copy_across "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle);
    fill "cuMemsetD8Async" (u64, c_uchar, usize, Handle);
    stream_create "cuStreamCreateWithPriority" (*mut Handle, c_uint, c_int);
    stream_destroy "cuStreamDestroy_v2" (Handle);
    stream_synchronize "cuStreamSynchronize" (Handle);
    stream_query "cuStreamQuery" (Handle);
    stream_wait "cuStreamWaitEvent" (Handle, Handle, c_uint);
    stream_is_capturing "cuStreamIsCapturing" (Handle, *mut c_int);
    event_create "cuEventCreate" (*mut Handle, c_uint);
    event_destroy "cuEventDestroy_v2" (Handle);
    event_record "cuEventRecord" (Handle, Handle);
    event_query "cuEventQuery" (Handle);
    event_synchronize "cuEventSynchronize" (Handle);
    event_elapsed "cuEventElapsedTime_v2" (*mut c_float, Handle, Handle);
    module_load "cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload "cuModuleUnload" (Handle);
    module_function "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    launch "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    capture_begin "cuStreamBeginCapture_v2" (Handle, c_int);
    capture_end "cuStreamEndCapture" (Handle, *mut Handle);
    capture_mode "cuThreadExchangeStreamCaptureMode" (*mut c_int);
    graph_instantiate "cuGraphInstantiateWithFlags" (*mut Handle, Handle, c_ulonglong);
    graph_destroy "cuGraphDestroy" (Handle);
    graph_launch "cuGraphLaunch" (Handle, Handle);
    executable_destroy "cuGraphExecDestroy" (Handle);
}

impl Calls {
    /// What the driver calls a code, and what it says of it.
    pub(crate) fn words_of(&self, code: Code) -> (String, String) {
        (self.text(self.error_name, code), self.text(self.error_string, code))
    }

    fn text(&self, get: unsafe extern "C" fn(Code, *mut *const c_char) -> Code, code: Code) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the call writes a pointer to a constant string that ends in 0, or null.
        unsafe {
            get(code, &mut text);
            if text.is_null() {
                "unknown".to_owned()
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }
}
