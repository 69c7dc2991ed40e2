//! The driver's calls, on GPUs that aren't there.

use super::machine;
use super::{answers, some_handle, successes};
use crate::calls::{Calls, Code, Handle};
use crate::codes::OUT_OF_MEMORY;
use crate::context::{MAJOR, MINOR, MULTIPROCESSORS};
use std::ffi::{c_char, c_float, c_int, c_uint, c_void};

/// The table, whose calls are these.
pub(crate) fn calls() -> Calls {
    Calls {
        init: done,
        error_name: no_words,
        error_string: no_words,
        device_count,
        device,
        device_name,
        device_uuid,
        device_bus,
        device_attribute,
        context_retain,
        context_release: done,
        context_set,
        context_synchronize: done_of_none,
        priorities,
        memory_info,
        memory_alloc,
        memory_free,
        host_alloc,
        host_free,
        copy_up: done_of_four,
        copy_down,
        copy_across: done_of_four,
        fill: done_of_four,
        stream_create,
        stream_destroy: done,
        stream_synchronize: done,
        stream_query: done,
        stream_wait,
        stream_is_capturing,
        event_create,
        event_destroy: done,
        event_record,
        event_query: done,
        event_synchronize: done,
        event_elapsed,
        module_load,
        module_unload: done,
        module_function,
        launch: done_of_eleven,
        capture_begin,
        capture_end,
        capture_mode: done,
        graph_instantiate,
        graph_destroy: done,
        graph_launch: done_of_two,
        executable_destroy: done,
    }
}

successes! {
    done_of_none<>;
    done<A>;
    done_of_two<A, B>;
    done_of_four<A, B, C, D>;
    done_of_eleven<A, B, C, D, E, F, G, H, I, J, K>;
}

answers! {
    no_words(_code: Code, out: *mut *const c_char) => *out = std::ptr::null();
    device_count(out: *mut c_int) => *out = c_int::from(u8::MAX);
    device(out: *mut c_int, number: c_int) => *out = number;
    device_uuid(out: *mut [u8; 16], number: c_int) => *out = u128::from(number.unsigned_abs()).to_be_bytes();
    device_attribute(out: *mut c_int, attribute: c_int, device: c_int) => *out = attribute_of(device, attribute);
    context_retain(out: *mut Handle, device: c_int) => *out = context_of(device);
    event_elapsed(out: *mut c_float, _from: Handle, _to: Handle) => *out = 0.0;
    stream_create(out: *mut Handle, _flags: c_uint, _priority: c_int) => *out = machine::new_handle();
    stream_is_capturing(stream: Handle, out: *mut c_int) => *out = c_int::from(machine::is_captured(stream));
    event_create(out: *mut Handle, _flags: c_uint) => *out = machine::new_handle();
    module_load(out: *mut Handle, _image: *const c_void) => *out = some_handle();
    module_function(out: *mut Handle, _module: Handle, _name: *const c_char) => *out = some_handle();
    graph_instantiate(out: *mut Handle, _graph: Handle, _flags: u64) => *out = some_handle();
}

fn attribute_of(device: c_int, attribute: c_int) -> c_int {
    let (gpu, _) = machine::kind(device);
    let number = match attribute {
        MULTIPROCESSORS => gpu.multiprocessors,
        MAJOR => gpu.architecture.major,
        MINOR => gpu.architecture.minor,
        _ => 0,
    };
    number as c_int
}

/// A context is known by its GPU; none is null.
fn context_of(device: c_int) -> Handle {
    std::ptr::without_provenance_mut(device as usize + 1)
}

extern "C" fn context_set(context: Handle) -> Code {
    machine::make_current(context.addr() as c_int - 1);
    0
}

unsafe extern "C" fn device_name(out: *mut c_char, room: c_int, device: c_int) -> Code {
    let (gpu, _) = machine::kind(device);
    // SAFETY: the caller has as much room.
    unsafe { write_text(gpu.name, out, room) }
}

unsafe extern "C" fn device_bus(out: *mut c_char, room: c_int, device: c_int) -> Code {
    let (_, number) = machine::kind(device);
    // SAFETY: the caller has as much room.
    unsafe { write_text(&format!("0000:{number:04x}:00.0"), out, room) }
}

/// Writes as much of a text as there is room for, with a 0 at the end.
///
/// # Safety
/// There are as many bytes as `room` says, at least one.
unsafe fn write_text(text: &str, out: *mut c_char, room: c_int) -> Code {
    let bytes = text.bytes().take(room.max(1) as usize - 1).chain([0]);
    // SAFETY: no more bytes come than there is room for, which is the caller's promise.
    bytes.enumerate().for_each(|(i, byte)| unsafe { out.add(i).write(byte as c_char) });
    0
}

unsafe extern "C" fn priorities(least: *mut c_int, greatest: *mut c_int) -> Code {
    // SAFETY: the caller has the call write both.
    unsafe {
        least.write(0);
        greatest.write(-1);
    }
    0
}

unsafe extern "C" fn memory_info(free: *mut usize, total: *mut usize) -> Code {
    let (bytes_free, bytes) = machine::memory();
    // SAFETY: the caller has the call write both.
    unsafe {
        free.write(bytes_free as usize);
        total.write(bytes as usize);
    }
    0
}

unsafe extern "C" fn memory_alloc(out: *mut u64, bytes: usize) -> Code {
    let Some(address) = machine::take(bytes) else { return OUT_OF_MEMORY };
    // SAFETY: the caller has the call write one address.
    unsafe { out.write(address) };
    0
}

extern "C" fn memory_free(address: u64) -> Code {
    machine::give_back(address);
    0
}

unsafe extern "C" fn host_alloc(out: *mut *mut c_void, bytes: usize, _flags: c_uint) -> Code {
    let at = machine::pin(bytes);
    if at.is_null() {
        return OUT_OF_MEMORY;
    }
    // SAFETY: the caller has the call write one pointer.
    unsafe { out.write(at) };
    0
}

extern "C" fn host_free(at: *mut c_void) -> Code {
    machine::unpin(at);
    0
}

/// All numbers of a GPU that isn't there are 0.
unsafe extern "C" fn copy_down(to: *mut c_void, _from: u64, bytes: usize, _stream: Handle) -> Code {
    // SAFETY: the caller has the call write so many bytes.
    unsafe { to.cast::<u8>().write_bytes(0, bytes) };
    0
}

extern "C" fn stream_wait(stream: Handle, event: Handle, _flags: c_uint) -> Code {
    machine::join(event, stream);
    0
}

extern "C" fn event_record(event: Handle, stream: Handle) -> Code {
    machine::record(stream, event);
    0
}

extern "C" fn capture_begin(stream: Handle, _mode: c_int) -> Code {
    machine::begin_capture(stream);
    0
}

unsafe extern "C" fn capture_end(stream: Handle, out: *mut Handle) -> Code {
    machine::end_capture(stream);
    // SAFETY: the caller has the call write one handle.
    unsafe { out.write(some_handle()) };
    0
}
