//! Whether the ranks of a group exchange numbers from GPU to GPU, or by way of the host.

use crate::error::Error;
use phalanx_comm::{GpuGroup, Group, Rank, Unfit, Via};
use phalanx_tensor::Device;

/// The way that numbers take from GPU to GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BetweenGpus {
    /// By NCCL where it can be used, else by way of the host, with a warning that says why. Gradients that are compressed, or summed
    /// by a hook of a program's own, go by way of the host.
    #[default]
    Best,
    /// By NCCL; where it can't be used, the strategy can't be prepared.
    Nccl,
    /// By way of the host.
    Host,
}

impl BetweenGpus {
    /// The GPUs of a group's ranks, this one's being `device`, if they are to exchange `what` among themselves. All ranks of the group
    /// must come with the same.
    pub(crate) fn meet(
        self,
        what: &str,
        group: &Group,
        device: &Device,
        via: Via,
    ) -> Result<Option<GpuGroup>, Error> {
        match device.gpu().filter(|_| self.is_tried(group, device)) {
            Some(gpu) => self.found(what, group, GpuGroup::over(group, gpu, via)?),
            None => Ok(None),
        }
    }

    /// Whether it is to be found out if the GPUs of a group's ranks can exchange anything among themselves.
    pub(crate) fn is_tried(self, group: &Group, device: &Device) -> bool {
        device.gpu().is_some() && self != BetweenGpus::Host && group.world_size() > 1
    }

    /// What comes of that.
    pub(crate) fn found<T>(
        self,
        what: &str,
        group: &Group,
        found: Result<T, Unfit>,
    ) -> Result<Option<T>, Error> {
        match found {
            Ok(found) => Ok(Some(found)),
            Err(why) if self == BetweenGpus::Nccl => Err(Error::NoNccl { why }),
            Err(why) => {
                // Ranks on one GPU are an experiment, and whoever makes it knows.
                if group.rank() == Rank(0) && !matches!(why, Unfit::SharedGpu { .. }) {
                    tracing::warn!("{what} go from GPU to GPU by way of the host, which is slow: {why}");
                }
                Ok(None)
            }
        }
    }
}
