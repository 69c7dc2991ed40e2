//! NCCL's calls, on GPUs that aren't there: whoever joins finds the others, and what is exchanged is there at once. A communicator is known
//! by how many ranks it has, and each rank sends what it does in a ring.

use super::{answers, machine, successes};
use crate::address::StreamHandle;
use crate::foreign::no_library;
use crate::nccl::foreign::{
    BFLOAT16, Comm, Config, DataType, FLOAT8_E4M3, FLOAT8_E5M2, FLOAT16, FLOAT64, ForeignId, Functions, INT8,
    INT64, INVALID_USAGE, RedOp, Residence, SUCCESS, Status, UINT8, UINT64,
};
use std::ffi::{c_char, c_int, c_void};

/// The table, whose calls are these.
pub(crate) fn nccl() -> Functions {
    Functions {
        version,
        error_string: words,
        last_error: words_of_comm,
        unique_id,
        init,
        split,
        finalize: done,
        destroy: done,
        abort: done,
        async_error,
        comm_count: unknown,
        comm_rank: unknown,
        group_start: done_of_none,
        group_end: done_of_none,
        all_reduce,
        reduce,
        broadcast,
        all_gather,
        reduce_scatter,
        send,
        receive: done_of_six,
        op_create,
        op_destroy: done_of_two,
        _library: no_library(),
    }
}

successes! {
    done_of_none<>;
    done<A>;
    done_of_two<A, B>;
    done_of_six<A, B, C, D, E, F>;
}

answers! {
    // That of the first which needs nothing of the environment for graphs.
    version(out: *mut c_int) => *out = 22_900;
    unique_id(out: *mut ForeignId) => *out = ForeignId { internal: [0; 128] };
    init(out: *mut Comm, ranks: c_int, _id: ForeignId, _rank: c_int, _config: *mut Config) => *out = comm_of(ranks);
    async_error(_comm: Comm, out: *mut Status) => *out = SUCCESS;
    op_create(out: *mut RedOp, _scalar: *mut c_void, _type: DataType, _where: Residence, _comm: Comm) => *out = 0;
}

fn comm_of(ranks: c_int) -> Comm {
    std::ptr::without_provenance_mut(ranks as usize)
}

/// In each round as many parts of `count` numbers go from this rank to its neighbour as there are other ranks.
fn round_a_ring(rounds: usize, count: usize, kind: DataType, comm: Comm, stream: StreamHandle) -> Status {
    sends(rounds * (comm.addr() - 1) * count, kind, stream)
}

/// What becomes part of a graph isn't sent yet.
fn sends(count: usize, kind: DataType, stream: StreamHandle) -> Status {
    if !machine::is_captured(stream.0) {
        machine::send((count * bytes_of(kind)) as u64);
    }
    SUCCESS
}

fn bytes_of(kind: DataType) -> usize {
    match kind {
        INT8 | UINT8 | FLOAT8_E4M3 | FLOAT8_E5M2 => 1,
        FLOAT16 | BFLOAT16 => 2,
        INT64 | UINT64 | FLOAT64 => 8,
        _ => 4,
    }
}

extern "C" fn all_reduce(
    _from: *const c_void,
    _to: *mut c_void,
    count: usize,
    kind: DataType,
    _op: RedOp,
    comm: Comm,
    stream: StreamHandle,
) -> Status {
    round_a_ring(2, count.div_ceil(comm.addr()), kind, comm, stream)
}

extern "C" fn reduce(
    _from: *const c_void,
    _to: *mut c_void,
    count: usize,
    kind: DataType,
    _op: RedOp,
    _root: c_int,
    comm: Comm,
    stream: StreamHandle,
) -> Status {
    round_a_ring(1, count.div_ceil(comm.addr()), kind, comm, stream)
}

extern "C" fn broadcast(
    _from: *const c_void,
    _to: *mut c_void,
    count: usize,
    kind: DataType,
    _root: c_int,
    comm: Comm,
    stream: StreamHandle,
) -> Status {
    round_a_ring(1, count.div_ceil(comm.addr()), kind, comm, stream)
}

extern "C" fn all_gather(
    _from: *const c_void,
    _to: *mut c_void,
    count: usize,
    kind: DataType,
    comm: Comm,
    stream: StreamHandle,
) -> Status {
    round_a_ring(1, count, kind, comm, stream)
}

extern "C" fn reduce_scatter(
    _from: *const c_void,
    _to: *mut c_void,
    count: usize,
    kind: DataType,
    _op: RedOp,
    comm: Comm,
    stream: StreamHandle,
) -> Status {
    round_a_ring(1, count, kind, comm, stream)
}

extern "C" fn send(
    _from: *const c_void,
    count: usize,
    kind: DataType,
    _peer: c_int,
    _comm: Comm,
    stream: StreamHandle,
) -> Status {
    sends(count, kind, stream)
}

/// Nobody asks one that has joined, and others can't be made of it.
extern "C" fn unknown(_comm: Comm, _out: *mut c_int) -> Status {
    INVALID_USAGE
}

extern "C" fn split(
    _comm: Comm,
    _color: c_int,
    _key: c_int,
    _out: *mut Comm,
    _config: *mut Config,
) -> Status {
    INVALID_USAGE
}

extern "C" fn words(_status: Status) -> *const c_char {
    c"not on a GPU that isn't there".as_ptr()
}

extern "C" fn words_of_comm(_comm: Comm) -> *const c_char {
    words(INVALID_USAGE)
}
