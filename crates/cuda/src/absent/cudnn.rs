//! cuDNN's calls, on GPUs that aren't there: any convolution has one engine, which needs no workspace.

use super::{answers, some_handle, successes};
use crate::cudnn::foreign::{
    AttributeName, AttributeType, BackendDescriptor, CONFIG_ENGINE, CudnnHandle, DescriptorType, Functions,
    HEUR_RESULTS, PLAN_WORKSPACE, SUCCESS, Status,
};
use crate::foreign::no_library;
use std::ffi::{c_char, c_void};

/// The table, whose calls are these.
pub(crate) fn cudnn() -> Functions {
    Functions {
        version,
        error_string: words,
        last_error: no_words,
        create,
        destroy: done,
        set_stream: done_of_two,
        descriptor_create,
        descriptor_destroy: done,
        finalize: done,
        set: done_of_five,
        get,
        execute: done_of_three,
        _library: no_library(),
    }
}

successes! {
    done<A>;
    done_of_two<A, B>;
    done_of_three<A, B, C>;
    done_of_five<A, B, C, D, E>;
}

answers! {
    create(out: *mut CudnnHandle) => *out = some_handle();
    descriptor_create(_type: DescriptorType, out: *mut BackendDescriptor) => *out = some_handle();
}

/// That of 9.0.
extern "C" fn version() -> usize {
    90_000
}

extern "C" fn words(_status: Status) -> *const c_char {
    c"no failure is possible".as_ptr()
}

extern "C" fn no_words(_out: *mut c_char, _room: usize) {}

unsafe extern "C" fn get(
    _descriptor: BackendDescriptor,
    name: AttributeName,
    _type: AttributeType,
    _room: i64,
    count: *mut i64,
    out: *mut c_void,
) -> Status {
    let there = match name {
        // Descriptors, which are the caller's own.
        HEUR_RESULTS | CONFIG_ENGINE => 1,
        PLAN_WORKSPACE => {
            // SAFETY: the caller has room for one number of this attribute's type.
            unsafe { out.cast::<i64>().write(0) };
            1
        }
        _ => 0,
    };
    // SAFETY: the caller has the call write how many there are.
    unsafe { count.write(there) };
    SUCCESS
}
