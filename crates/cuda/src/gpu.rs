//! A GPU of this machine, opened: its streams, its memory, its kernels.

use crate::absent::{self, AbsentGpu};
use crate::choices::Choices;
use crate::codes;
use crate::context::Context;
use crate::cubins::{Cubins, KernelCache};
use crate::cublaslt::CublasLt;
use crate::cudnn::Cudnn;
use crate::driver::Driver;
use crate::element::Element;
use crate::error::Error;
use crate::event::{Event, Timing};
use crate::memory::DeviceMemory;
use crate::modules::Modules;
use crate::nccl::Nccl;
use crate::nvrtc::{Architecture, Nvrtc};
use crate::pinned::Pinned;
use crate::source::Source;
use crate::stream::{Priority, Stream};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// How a GPU is opened.
#[derive(Clone, Debug, Default)]
pub struct GpuOptions {
    /// Folders in which NVIDIA's libraries are looked for, before those that the system knows; none by default.
    pub libraries: Vec<PathBuf>,
    /// The folder that keeps compiled kernels from one start to the next, and what searches chose; by default every process compiles
    /// its own.
    pub kernels: Option<PathBuf>,
    /// Whether all work is waited for; by default none is.
    pub debug_sync: DebugSync,
    /// A kind of GPU that is none of this machine's: all is done with it but to compute. By default it is one that is there.
    pub absent: Option<AbsentGpu>,
}

/// Whether everything that streams are given is waited for, so that what fails is named: launches of kernels and graphs, copies and
/// fills. Whoever has a library give a stream work says so by [`Stream::launched`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DebugSync {
    /// Each is, and a graph as a whole. Slow.
    Yes,
    /// A failure shows at some later call.
    #[default]
    No,
}

/// How much memory a GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// Bytes that nobody has, this process or another.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// A GPU. Clones are the same one; it is closed when the last of them, and of all that was made with them, is dropped.
#[derive(Clone)]
pub struct Gpu(Arc<Opened>);

struct Opened {
    libraries: Vec<PathBuf>,
    absent: Option<AbsentGpu>,
    name: String,
    architecture: Architecture,
    multiprocessors: u32,
    modules: Modules,
    choices: Choices,
    compute: Stream,
    copy: Stream,
    comm: Stream,
    context: Arc<Context>,
}

impl Gpu {
    /// Opens the GPU of this number, counted among those that the process may see. Fails where driver, compiler or GPU aren't
    /// there or don't work, and says what to do.
    pub fn open(index: u32, options: &GpuOptions) -> Result<Gpu, Error> {
        let (driver, nvrtc) = match options.absent {
            None => (Driver::open(&options.libraries)?, Some(Nvrtc::open(&options.libraries)?)),
            Some(kind) => (Driver::absent(kind), None),
        };
        let context = Arc::new(Context::open(driver, index, options.debug_sync)?);
        let architecture = context.architecture()?;
        let (name, multiprocessors) = (context.name()?, context.multiprocessors()?);
        let described = format!("{name}, sm_{architecture}, {multiprocessors} multiprocessors");
        Ok(Gpu(Arc::new(Opened {
            libraries: options.libraries.clone(),
            absent: options.absent,
            name,
            architecture,
            multiprocessors,
            choices: Choices::new(options.kernels.clone(), described),
            modules: Modules::new(nvrtc, architecture, Cubins::new(options.kernels.clone())),
            compute: Stream::new(&context, Priority::Low)?,
            copy: Stream::new(&context, Priority::High)?,
            comm: Stream::new(&context, Priority::High)?,
            context,
        })))
    }

    /// Its number.
    pub fn index(&self) -> u32 {
        self.0.context.gpu()
    }

    /// The library of matrix products, opened for it.
    pub fn cublaslt(&self) -> Result<CublasLt, Error> {
        self.0.absent.map_or_else(|| CublasLt::open(&self.0.libraries), |_| Ok(CublasLt::absent()))
    }

    /// That of convolutions.
    pub fn cudnn(&self) -> Result<Cudnn, Error> {
        self.0.absent.map_or_else(|| Cudnn::open(&self.0.libraries), |_| Ok(Cudnn::absent()))
    }

    /// That of collectives.
    pub fn nccl(&self) -> Result<Nccl, Error> {
        self.0.absent.map_or_else(|| Nccl::open(&self.0.libraries), |_| Ok(Nccl::absent()))
    }

    /// Whether all that its streams are given is waited for.
    pub fn debug_sync(&self) -> DebugSync {
        self.0.context.debug_sync()
    }

    /// Whether it computes: one that isn't there doesn't, and all its numbers are 0.
    pub fn computes(&self) -> bool {
        self.0.absent.is_none()
    }

    /// How many bytes it has sent to other GPUs so far, where it is none that computes: without what graphs have sent.
    pub fn sent_bytes(&self) -> Option<u64> {
        self.0.absent.map(|_| absent::sent(self.0.context.number()))
    }

    /// What NVIDIA calls it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Where it is plugged in, which tells it from all others of its host. Parts of one GPU have the same.
    pub fn bus_id(&self) -> Result<String, Error> {
        self.0.context.bus_id()
    }

    /// What it can do.
    pub fn architecture(&self) -> Architecture {
        self.0.architecture
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors
    }

    /// How much memory it has, and how much of that is free now.
    pub fn memory(&self) -> Result<GpuMemory, Error> {
        let (free, total) = self.0.context.memory()?;
        Ok(GpuMemory { free, total })
    }

    /// What its memory or its links to others have met, if they are at fault: no other process does better on it then.
    pub fn fault(&self) -> Option<Error> {
        let met = self.0.compute.is_done().err()?;
        matches!(met, Error::Call { code, .. } if codes::is_fault(code)).then_some(met)
    }

    /// The stream of kernels.
    pub fn compute(&self) -> &Stream {
        &self.0.compute
    }

    /// The stream of copies from and to the host.
    pub fn copy(&self) -> &Stream {
        &self.0.copy
    }

    /// The stream of what GPUs tell each other.
    pub fn comm(&self) -> &Stream {
        &self.0.comm
    }

    /// One more stream.
    pub fn stream(&self, priority: Priority) -> Result<Stream, Error> {
        Stream::new(&self.0.context, priority)
    }

    /// A new event.
    pub fn event(&self, timing: Timing) -> Result<Event, Error> {
        Event::new(&self.0.context, timing)
    }

    /// So many bytes of its memory, which are 0 for what `stream` does from now on; another stream has to wait for an event first.
    pub fn alloc(&self, stream: &Stream, bytes: usize) -> Result<DeviceMemory, Error> {
        stream.of_one_gpu("alloc", &self.0.context);
        DeviceMemory::zeroed(stream, bytes)
    }

    /// So many bytes of the host's memory, which are 0, and which the GPU can copy while the program goes on.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned, Error> {
        Pinned::zeroed(&self.0.context, bytes)
    }

    /// Loads the kernels of a source for a type of elements, so that no launch has to.
    pub fn prepare(&self, source: Source, element: Element) -> Result<(), Error> {
        self.0.modules.prepare(&self.0.context, source, element)
    }

    /// Where its kernels came from so far.
    pub fn kernel_cache(&self) -> KernelCache {
        self.0.modules.cache()
    }

    /// What searches chose for GPUs like this one.
    pub fn choices(&self) -> &Choices {
        &self.0.choices
    }

    /// Makes it the GPU that other libraries of NVIDIA's mean on this thread, which their calls need. Ours see to it themselves.
    pub fn make_current(&self) -> Result<(), Error> {
        self.0.context.make_current()
    }

    /// Waits for all of its streams, of which none may be captured.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.0.context.synchronize()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    pub(crate) fn modules(&self) -> &Modules {
        &self.0.modules
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.modules.unload(&self.context);
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({}: {}, sm_{})", self.index(), self.0.name, self.0.architecture)
    }
}
