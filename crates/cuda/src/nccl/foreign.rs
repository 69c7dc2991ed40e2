//! What of nccl.h is called.

use crate::address::StreamHandle;
use crate::foreign::{constants, functions};
use crate::library::Library;
use std::ffi::{c_char, c_int, c_uint, c_void};

pub(crate) type Status = c_int;
pub(crate) type Comm = *mut c_void;
pub(crate) type DataType = c_int;
pub(crate) type RedOp = c_int;
pub(crate) type Residence = c_int;

/// By what ranks find each other, as the library passes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ForeignId {
    pub(crate) internal: [c_char; 128],
}

/// How a communicator is to be: the struct of NCCL 2.29. Its size and version tell later libraries which fields it has, and earlier ones
/// read no further than they know.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_scheduling: c_int,
    graph_usage: c_int,
    rma_contexts: c_int,
}

/// The library reads as many bytes as the struct says it has: what only fills it up would be read as a field of a later version.
const _: () = assert!(
    size_of::<Config>() == std::mem::offset_of!(Config, rma_contexts) + size_of::<c_int>(),
    "the struct ends with its last field"
);

impl Config {
    /// Calls return at once; what is in a graph and what isn't are never under way together; all else is up to the library.
    pub(crate) fn not_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: 2_29_00,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_scheduling: UNDEFINED,
            graph_usage: ONE_GRAPH,
            rma_contexts: UNDEFINED,
        }
    }
}

/// The library's mark of a struct that was initialised, `NCCL_API_MAGIC`.
pub(crate) const MAGIC: c_uint = 0xcafe_beef;
/// A field that is left to the library, `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: c_int = c_int::MIN;
/// Of a communicator's operations, either those of one graph are under way or others. The library's own choice, 2, allows both at once by
/// events of its own, by which graphs with operations of several communicators have been seen to keep each other waiting for good
/// (`NCCL_GRAPH_MIXING_SUPPORT` in its guide, which goes before this: [`super::InGraphs`]).
const ONE_GRAPH: c_int = 1;

functions! {
    /// The functions of NCCL.
    Functions of Library::Nccl;
    version "ncclGetVersion" (*mut c_int) -> Status;
    error_string "ncclGetErrorString" (Status) -> *const c_char;
    last_error "ncclGetLastError" (Comm) -> *const c_char;
    unique_id "ncclGetUniqueId" (*mut ForeignId) -> Status;
    init "ncclCommInitRankConfig" (*mut Comm, c_int, ForeignId, c_int, *mut Config) -> Status;
    split "ncclCommSplit" (Comm, c_int, c_int, *mut Comm, *mut Config) -> Status;
    finalize "ncclCommFinalize" (Comm) -> Status;
    destroy "ncclCommDestroy" (Comm) -> Status;
    abort "ncclCommAbort" (Comm) -> Status;
    async_error "ncclCommGetAsyncError" (Comm, *mut Status) -> Status;
    comm_count "ncclCommCount" (Comm, *mut c_int) -> Status;
    comm_rank "ncclCommUserRank" (Comm, *mut c_int) -> Status;
    group_start "ncclGroupStart" () -> Status;
    group_end "ncclGroupEnd" () -> Status;
    all_reduce "ncclAllReduce" (*const c_void, *mut c_void, usize, DataType, RedOp, Comm, StreamHandle) -> Status;
    reduce "ncclReduce" (*const c_void, *mut c_void, usize, DataType, RedOp, c_int, Comm, StreamHandle) -> Status;
    broadcast "ncclBroadcast" (*const c_void, *mut c_void, usize, DataType, c_int, Comm, StreamHandle) -> Status;
    all_gather "ncclAllGather" (*const c_void, *mut c_void, usize, DataType, Comm, StreamHandle) -> Status;
    reduce_scatter "ncclReduceScatter" (*const c_void, *mut c_void, usize, DataType, RedOp, Comm, StreamHandle) -> Status;
    send "ncclSend" (*const c_void, usize, DataType, c_int, Comm, StreamHandle) -> Status;
    receive "ncclRecv" (*mut c_void, usize, DataType, c_int, Comm, StreamHandle) -> Status;
    op_create "ncclRedOpCreatePreMulSum" (*mut RedOp, *mut c_void, DataType, Residence, Comm) -> Status;
    op_destroy "ncclRedOpDestroy" (RedOp, Comm) -> Status;
}

constants! {
    SUCCESS "ncclSuccess" 0;
    UNHANDLED_CUDA_ERROR "ncclUnhandledCudaError" 1;
    SYSTEM_ERROR "ncclSystemError" 2;
    INTERNAL_ERROR "ncclInternalError" 3;
    INVALID_ARGUMENT "ncclInvalidArgument" 4;
    INVALID_USAGE "ncclInvalidUsage" 5;
    REMOTE_ERROR "ncclRemoteError" 6;
    IN_PROGRESS "ncclInProgress" 7;

    SUM "ncclSum" 0;
    PRODUCT "ncclProd" 1;
    MAX "ncclMax" 2;
    MIN "ncclMin" 3;
    AVERAGE "ncclAvg" 4;

    INT8 "ncclInt8" 0;
    UINT8 "ncclUint8" 1;
    INT32 "ncclInt32" 2;
    UINT32 "ncclUint32" 3;
    INT64 "ncclInt64" 4;
    UINT64 "ncclUint64" 5;
    FLOAT16 "ncclFloat16" 6;
    FLOAT32 "ncclFloat32" 7;
    FLOAT64 "ncclFloat64" 8;
    BFLOAT16 "ncclBfloat16" 9;
    FLOAT8_E4M3 "ncclFloat8e4m3" 10;
    FLOAT8_E5M2 "ncclFloat8e5m2" 11;

    HOST_IMMEDIATE "ncclScalarHostImmediate" 1;
    NO_COLOR "NCCL_SPLIT_NOCOLOR" -1;
}

/// The bytes from the struct's start of each field that NCCL's header has as well.
#[cfg(test)]
pub(crate) fn config_fields() -> [(&'static str, usize); 19] {
    use std::mem::offset_of;
    [
        ("size", offset_of!(Config, size)),
        ("magic", offset_of!(Config, magic)),
        ("version", offset_of!(Config, version)),
        ("blocking", offset_of!(Config, blocking)),
        ("cgaClusterSize", offset_of!(Config, cga_cluster_size)),
        ("minCTAs", offset_of!(Config, min_ctas)),
        ("maxCTAs", offset_of!(Config, max_ctas)),
        ("netName", offset_of!(Config, net_name)),
        ("splitShare", offset_of!(Config, split_share)),
        ("trafficClass", offset_of!(Config, traffic_class)),
        ("commName", offset_of!(Config, comm_name)),
        ("collnetEnable", offset_of!(Config, collnet_enable)),
        ("CTAPolicy", offset_of!(Config, cta_policy)),
        ("shrinkShare", offset_of!(Config, shrink_share)),
        ("nvlsCTAs", offset_of!(Config, nvls_ctas)),
        ("nChannelsPerNetPeer", offset_of!(Config, channels_per_net_peer)),
        ("nvlinkCentricSched", offset_of!(Config, nvlink_centric_scheduling)),
        ("graphUsageMode", offset_of!(Config, graph_usage)),
        ("numRmaCtx", offset_of!(Config, rma_contexts)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::headers::check;

    #[test]
    fn it_is_as_the_header_says() {
        let names = [
            ("Status", "ncclResult_t"),
            ("Comm", "ncclComm_t"),
            ("DataType", "ncclDataType_t"),
            ("RedOp", "ncclRedOp_t"),
            ("Residence", "ncclScalarResidence_t"),
            ("ForeignId", "ncclUniqueId"),
            ("Config", "ncclConfig_t"),
        ];
        let mut more = format!(
            "static_assert(sizeof(ncclUniqueId) == {}, \"id\");\n#ifdef NCCL_API_MAGIC\nstatic_assert(NCCL_API_MAGIC == {MAGIC}u, \"magic\");\n#endif\nstatic_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN, \"undefined\");\n",
            size_of::<ForeignId>()
        );
        more.extend(config_fields().iter().map(|(name, bytes)| {
            // Earlier ones don't know the last fields.
            let since = if ["graphUsageMode", "numRmaCtx"].contains(name) { 22900 } else { 22700 };
            format!(
                "#if NCCL_VERSION_CODE >= {since}\nstatic_assert(offsetof(ncclConfig_t, {name}) == {bytes}, \"{name}\");\n#endif\n"
            )
        }));
        more += &format!(
            "#if NCCL_VERSION_CODE >= 22900 && NCCL_VERSION_CODE < 23000\nstatic_assert(sizeof(ncclConfig_t) == {}, \"its size\");\n#endif\n",
            size_of::<Config>()
        );
        check("nccl.h", Functions::TABLE, TABLE, &names, &more);
    }
}
