//! What a rank computes on, by a word: the CPU's threads, or a GPU.

use crate::error::Error;
use phalanx_data::Places;
use phalanx_tensor::{DebugSync, Device, GpuOptions};
use std::fmt;
use std::str::FromStr;

/// A device as it is asked for: `cpu`, `cuda` or `cuda:N`.
///
/// ```
/// use phalanx::DeviceSpec;
/// assert_eq!("cuda:1".parse(), Ok(DeviceSpec::Cuda(Some(1))));
/// assert_eq!(DeviceSpec::Cuda(None).to_string(), "cuda");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeviceSpec {
    /// Threads of the host.
    #[default]
    Cpu,
    /// The GPU of this number, which all ranks of a machine share; without a number, for each rank that of its local rank. GPUs are
    /// counted among those that the process may see, so `CUDA_VISIBLE_DEVICES` chooses which these are, parts of a GPU (MIG) too.
    Cuda(Option<u32>),
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceSpec, String> {
        let wrong = || "must be cpu, cuda, or cuda:N with the number of a GPU".to_owned();
        match text.split_once(':') {
            None if text == "cpu" => Ok(DeviceSpec::Cpu),
            None if text == "cuda" => Ok(DeviceSpec::Cuda(None)),
            Some(("cuda", number)) => {
                number.parse().map(|number| DeviceSpec::Cuda(Some(number))).map_err(|_| wrong())
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceSpec::Cpu => f.write_str("cpu"),
            DeviceSpec::Cuda(None) => f.write_str("cuda"),
            DeviceSpec::Cuda(Some(number)) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceSpec {
    /// How many GPUs this process may see. Fails where driver, compiler or cuBLASLt aren't there or are too old, and says what to
    /// install; no GPU is touched.
    pub fn gpus() -> Result<u32, Error> {
        Ok(Device::cuda_count(&GpuOptions::default())?)
    }

    /// Fails unless so many ranks of one machine find what it says, as far as that can be told without touching a GPU.
    pub fn check(self, local_world_size: usize) -> Result<(), Error> {
        if self == DeviceSpec::Cpu {
            return Ok(());
        }
        let present = DeviceSpec::gpus()?;
        (0..local_world_size).try_for_each(|local_rank| self.number(|_| local_rank, present).map(drop))
    }

    /// The GPU, of so many that are there, of a rank that says which one is its own; none on a CPU.
    fn number(self, own: impl FnOnce(usize) -> usize, present: u32) -> Result<Option<u32>, Error> {
        let DeviceSpec::Cuda(number) = self else { return Ok(None) };
        let number = number.unwrap_or_else(|| own(present as usize) as u32);
        if number < present {
            Ok(Some(number))
        } else {
            Err(Error::NoSuchGpu { number, asked: self, present })
        }
    }

    /// The device of a rank, with so many threads where it is the CPU. Where no number is named, `own` says which of so many GPUs is
    /// the rank's own; `debug_sync` says whether all that a GPU is given is waited for. Compiled kernels are kept in the user's cache
    /// folder. Fails where there is no such device, and says what to do.
    pub fn open(
        self,
        threads: usize,
        own: impl FnOnce(usize) -> usize,
        debug_sync: DebugSync,
    ) -> Result<Device, Error> {
        if self == DeviceSpec::Cpu {
            return Ok(Device::cpu(threads));
        }
        let Some(number) = self.number(own, DeviceSpec::gpus()?)? else {
            unreachable!("what is no CPU has a number")
        };
        let kernels = Places::from_env(None).cache.map(|cache| cache.join("kernels"));
        Ok(Device::cuda(number, &GpuOptions { kernels, debug_sync, ..GpuOptions::default() })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_as_users_name_them() {
        for spec in
            [DeviceSpec::Cpu, DeviceSpec::Cuda(None), DeviceSpec::Cuda(Some(0)), DeviceSpec::Cuda(Some(12))]
        {
            assert_eq!(spec.to_string().parse(), Ok(spec));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CPU", "cuda:0:1"] {
            assert!(wrong.parse::<DeviceSpec>().unwrap_err().contains("cuda:N"), "{wrong}");
        }
    }

    #[test]
    fn ranks_have_a_gpu_each_or_share_the_one_that_is_named() {
        let number =
            |spec: DeviceSpec, local_rank| spec.number(|_| local_rank, 2).map_err(|error| error.to_string());
        assert_eq!(number(DeviceSpec::Cpu, 5), Ok(None));
        assert_eq!(number(DeviceSpec::Cuda(None), 1), Ok(Some(1)));
        assert_eq!(number(DeviceSpec::Cuda(Some(1)), 7), Ok(Some(1)));
        let refused = number(DeviceSpec::Cuda(None), 2).unwrap_err();
        assert!(
            ["GPU 2", "there are 2", "--device cuda:0"].iter().all(|part| refused.contains(part)),
            "{refused}"
        );
        let refused = number(DeviceSpec::Cuda(Some(2)), 0).unwrap_err();
        assert!(["--device cuda:2", "there are 2"].iter().all(|part| refused.contains(part)), "{refused}");
    }
}
