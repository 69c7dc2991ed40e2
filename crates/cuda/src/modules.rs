//! The kernels that are loaded on a GPU: a module for each source and type of elements, from the time of its first use on.

use crate::calls::Handle;
use crate::context::{Context, Leftover};
use crate::cubins::{Cubins, KernelCache};
use crate::element::Element;
use crate::error::Error;
use crate::kernels::Kernel;
use crate::lock::lock;
use crate::nvrtc::{Architecture, Nvrtc};
use crate::source::Source;
use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

pub(crate) struct Modules {
    /// None where no kernel runs.
    nvrtc: Option<Nvrtc>,
    architecture: Architecture,
    cubins: Cubins,
    // Held while one is compiled: who wants the same at that time would only compile it, too.
    loaded: Mutex<HashMap<(Source, Element), Module>>,
    functions: RwLock<HashMap<(&'static str, Element), Function>>,
}

/// A kernel that is loaded, for as long as its module is.
#[derive(Clone, Copy)]
pub(crate) struct Function(Handle);

// SAFETY: the driver takes a function from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub(crate) fn raw(self) -> Handle {
        self.0
    }
}

impl Modules {
    pub(crate) fn new(nvrtc: Option<Nvrtc>, architecture: Architecture, cubins: Cubins) -> Modules {
        Modules { nvrtc, architecture, cubins, loaded: Mutex::default(), functions: RwLock::default() }
    }

    pub(crate) fn cache(&self) -> KernelCache {
        self.cubins.report()
    }

    pub(crate) fn function(
        &self,
        context: &Arc<Context>,
        kernel: &'static Kernel,
        element: Element,
    ) -> Result<Function, Error> {
        let key = (kernel.name, element);
        let known = self.functions.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(function) = known {
            return Ok(function);
        }
        let function = self.with_module(context, kernel.source, element, |module| {
            context.beside_captures(|| module.function(kernel.name))
        })?;
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(key, function);
        Ok(function)
    }

    /// Unloads all of them once no stream is captured any more, and none of them runs: either would be spoilt by it.
    pub(crate) fn unload(&mut self, context: &Arc<Context>) {
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        let modules = std::mem::take(loaded).into_values().collect();
        context.give_back(Leftover::Kernels(modules));
    }

    pub(crate) fn prepare(
        &self,
        context: &Arc<Context>,
        source: Source,
        element: Element,
    ) -> Result<(), Error> {
        self.with_module(context, source, element, |_| Ok(()))
    }

    /// What `use_it` makes of a module, which is loaded where it isn't yet.
    fn with_module<T>(
        &self,
        context: &Arc<Context>,
        source: Source,
        element: Element,
        use_it: impl FnOnce(&Module) -> Result<T, Error>,
    ) -> Result<T, Error> {
        // A source that asks for no type has one module.
        let element = if source.elements().contains(&element) { element } else { source.elements()[0] };
        let mut loaded = lock(&self.loaded);
        if let Some(module) = loaded.get(&(source, element)) {
            return use_it(module);
        }
        let cubin = match &self.nvrtc {
            Some(nvrtc) => {
                let target = nvrtc.target(self.architecture)?;
                let compile = || nvrtc.for_gpu(source, element, target);
                self.cubins.get(source, element, target, nvrtc.version(), compile)?
            }
            None => Vec::new(),
        };
        let module = context.beside_captures(|| Module::load(context, source, element, &cubin))?;
        let result = use_it(&module);
        loaded.insert((source, element), module);
        result
    }
}

/// Kernels of a source, loaded as long as it is there.
pub(crate) struct Module {
    context: Arc<Context>,
    handle: Handle,
    source: Source,
    element: Element,
}

// SAFETY: the driver takes a module from any thread.
unsafe impl Send for Module {}

impl Module {
    fn load(context: &Arc<Context>, source: Source, element: Element, cubin: &[u8]) -> Result<Module, Error> {
        // Machine code tells its length itself; text ends in a 0.
        let image = [cubin, &[0]].concat();
        let mut handle = ptr::null_mut();
        // SAFETY: the image is what the compiler made, which its checksum vouches for where it comes from disk; the call copies it and
        // writes one handle, which is unloaded with the module.
        let code = unsafe { (context.enter()?.module_load)(&mut handle, image.as_ptr().cast()) };
        context.succeeded("cuModuleLoadData", code, || {
            format!("{} for {}, {} bytes", source.file(), element.in_source(), cubin.len())
        })?;
        Ok(Module { context: context.clone(), handle, source, element })
    }

    fn function(&self, name: &'static str) -> Result<Function, Error> {
        let c_name = CString::new(name).expect("a kernel's name has no 0 in it");
        let mut handle = ptr::null_mut();
        // SAFETY: the module is alive, the name ends in 0; the call writes one handle.
        let code =
            unsafe { (self.context.enter()?.module_function)(&mut handle, self.handle, c_name.as_ptr()) };
        self.context.succeeded("cuModuleGetFunction", code, || {
            format!("{name} in {} for {}", self.source.file(), self.element.in_source())
        })?;
        Ok(Function(handle))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(calls) = self.context.enter() else { return };
        // SAFETY: loaded in `load`; its functions are forgotten together with it.
        unsafe { (calls.module_unload)(self.handle) };
    }
}
