//! The folder of compiled kernels: what it saves, and that nothing in it can do harm.

use crate::rig::{affine, fake, floats, options};
use phalanx_cuda::{Gpu, GpuOptions, KernelCache};
use phalanx_fake_cuda::FakeCuda;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Opens a GPU with this folder, launches a kernel, and gives where it came from.
fn start(fake: &FakeCuda, folder: &Path) -> KernelCache {
    let gpu = Gpu::open(0, &GpuOptions { kernels: Some(folder.to_owned()), ..options(fake) }).unwrap();
    let memory = gpu.alloc(gpu.compute(), 40).unwrap();
    affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap();
    assert_eq!(floats(&gpu.compute().read(&memory, 0..40).unwrap()), [1.0; 10]);
    gpu.kernel_cache()
}

fn came(from_disk: u64, compiled: u64) -> KernelCache {
    KernelCache { from_disk, compiled, not_kept: None }
}

fn only_file(folder: &Path) -> PathBuf {
    let files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn a_second_start_compiles_nothing() {
    let Some(first) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let kernels = folder.path().join("of/kernels");
    assert_eq!(start(&first, &kernels), came(0, 1));
    let second = fake().unwrap();
    assert_eq!(start(&second, &kernels), came(1, 0));
    assert_eq!((first.compilations(), second.compilations()), (1, 0));
    let name = only_file(&kernels).file_name().unwrap().to_str().unwrap().to_owned();
    assert!(name.starts_with("elementwise-float-sm_90-") && name.ends_with(".cubin"), "{name}");
}

#[test]
fn what_is_damaged_is_compiled_anew_and_mended() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    start(&fake, folder.path());
    let file = only_file(folder.path());
    let whole = fs::read(&file).unwrap();
    let mut changed = whole.clone();
    *changed.last_mut().unwrap() ^= 1;
    for damaged in [&[][..], b"nonsense", &whole[..whole.len() - 1], &whole[..20], &changed] {
        fs::write(&file, damaged).unwrap();
        assert_eq!(start(&fake, folder.path()), came(0, 1));
        assert!(fs::read(&file).unwrap() == whole);
        assert_eq!(start(&fake, folder.path()), came(1, 0));
    }
    // Not even a file.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(start(&fake, folder.path()).compiled, 1);
}

#[test]
fn a_folder_that_can_not_be_written_costs_time_only() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    fs::write(&file, "").unwrap();
    let KernelCache { compiled, not_kept, .. } = start(&fake, &file);
    assert!(compiled == 1 && not_kept.as_ref().unwrap().contains("a file"), "{not_kept:?}");
}

const SHARED: &str = "PHALANX_TEST_SHARED_KERNELS";

/// One of the processes of the next test; of no use by itself.
#[test]
fn one_of_two_processes() {
    let (Some(folder), Some(fake)) = (std::env::var_os(SHARED), fake()) else { return };
    for _ in 0..20 {
        start(&fake, Path::new(&folder));
        // Another process finds it or doesn't, but never half of it.
        for entry in fs::read_dir(&folder).unwrap() {
            let _ = fs::remove_file(entry.unwrap().path());
        }
    }
    start(&fake, Path::new(&folder));
}

#[test]
fn two_processes_at_once_do_no_harm() {
    let Some(fake) = fake() else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kernels_on_disk::one_of_two_processes"])
            .env(SHARED, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    for child in [run(), run()] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    start(&fake, folder.path());
    assert_eq!(start(&fake, folder.path()), came(1, 0));
    only_file(folder.path());
}
