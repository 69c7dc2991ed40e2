//! Random numbers, each a function of its key and its place alone, as on a CPU.

use crate::gpu::Engine;
use crate::gpu::launch::{Arg, check_single, elements};
use crate::philox::Philox;
use crate::tensor::Tensor;

impl Engine {
    /// Fills a row-major tensor with numbers in [low, high).
    #[track_caller]
    pub(crate) fn uniform(&self, low: f64, high: f64, key: Philox, out: &Tensor) {
        check_single("uniform", out.dtype);
        let [seed, stream] = key.words().map(Arg::Bits);
        // A double just below `high` may round to `high` itself.
        let largest = Arg::Float(f64::from((high as f32).next_down().max(low as f32)));
        let [low, high] = [low, high].map(Arg::Double);
        let n = out.count();
        // SAFETY: as many elements as the tensor has are written.
        unsafe {
            self.launch(
                "uniform",
                elements(n),
                &[Arg::Out(out), seed, stream, low, high, largest, Arg::Int(n)],
            );
        }
    }

    /// Fills a row-major tensor with numbers of the normal distribution.
    #[track_caller]
    pub(crate) fn normal(&self, mean: f64, std: f64, key: Philox, out: &Tensor) {
        check_single("normal", out.dtype);
        let [seed, stream] = key.words().map(Arg::Bits);
        let [mean, std] = [mean, std].map(Arg::Double);
        let n = out.count();
        // SAFETY: as many elements as the tensor has are written.
        unsafe { self.launch("normal", elements(n), &[Arg::Out(out), seed, stream, mean, std, Arg::Int(n)]) }
    }
}
