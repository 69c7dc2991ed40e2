//! A fake driver with all kernels of this project.

use phalanx_cuda::{KERNELS, Source};
use phalanx_fake_cuda::{FakeCuda, Module};
use std::path::Path;

/// A driver that nobody else uses; none, said aloud, where there is no C++ compiler.
pub(crate) fn fake() -> Option<FakeCuda> {
    let modules = Source::ALL.into_iter().flat_map(|source| {
        source.elements().iter().map(move |element| Module {
            file: source.file(),
            element: element.in_source(),
            kernels: KERNELS
                .iter()
                .filter(|kernel| kernel.source == source)
                .map(|kernel| kernel.name)
                .collect(),
        })
    });
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/kernels");
    FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &kernels, &modules.collect::<Vec<_>>())
}
