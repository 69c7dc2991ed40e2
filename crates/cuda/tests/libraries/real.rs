//! NVIDIA's own libraries, as far as they go without a GPU: they have the functions that are called, and where a GPU is needed
//! they say so in words. They come with the Python packages nvidia-cublas, nvidia-cudnn-cu13 and nvidia-nccl-cu13;
//! `PHALANX_TEST_CUDA_LIBRARIES` names their folders, with `:` between them.

use phalanx_cuda::cublaslt::CublasLt;
use phalanx_cuda::cudnn::Cudnn;
use phalanx_cuda::nccl::Nccl;
use phalanx_cuda::{Driver, Error};
use std::path::PathBuf;
use std::time::Duration;

/// Where the libraries lie, or nowhere, said aloud.
fn folders() -> Option<Vec<PathBuf>> {
    let Some(named) = std::env::var_os("PHALANX_TEST_CUDA_LIBRARIES") else {
        eprintln!("skipped: PHALANX_TEST_CUDA_LIBRARIES names no folders of NVIDIA's libraries");
        return None;
    };
    Some(std::env::split_paths(&named).collect())
}

fn has_gpu() -> bool {
    Driver::open(&[]).is_ok_and(|driver| driver.gpus() > 0)
}

/// Panics unless this failed in words for lack of a GPU.
#[track_caller]
fn lacks_a_gpu<T>(result: Result<T, Error>, call: &str) {
    let Err(error) = result else { panic!("{call} needs no GPU") };
    let words = error.to_string();
    eprintln!("{words}");
    assert!(words.contains(call) && words.contains("hint:"), "{words}");
}

#[test]
fn cublaslt_opens_and_asks_for_a_gpu() {
    let Some(folders) = folders() else { return };
    let cublaslt = CublasLt::open(&folders).unwrap_or_else(|error| panic!("{error}"));
    assert!(cublaslt.version() >= (13, 0, 0), "{cublaslt:?}");
    if !has_gpu() {
        lacks_a_gpu(cublaslt.products(0), "cublasLtCreate");
    }
}

#[test]
fn cudnn_opens_and_asks_for_a_gpu() {
    let Some(folders) = folders() else { return };
    let cudnn = Cudnn::open(&folders).unwrap_or_else(|error| panic!("{error}"));
    assert!(cudnn.version() >= (9, 0, 0), "{cudnn:?}");
    if !has_gpu() {
        lacks_a_gpu(cudnn.convolutions(0), "cudnnCreate");
    }
}

#[test]
fn nccl_opens_and_asks_for_a_gpu() {
    let Some(folders) = folders() else { return };
    let nccl = Nccl::open(&folders).unwrap_or_else(|error| panic!("{error}"));
    assert!(nccl.version().unwrap() >= (2, 27, 0), "{nccl:?}");
    if has_gpu() {
        return;
    }
    match nccl.unique_id() {
        Ok(id) => {
            let joined = nccl.join(&id, 0, 1, Duration::from_secs(20));
            lacks_a_gpu(joined.and_then(|joined| joined.ready()), "ncclCommInitRankConfig");
        }
        failed => lacks_a_gpu(failed, "ncclGetUniqueId"),
    }
}
