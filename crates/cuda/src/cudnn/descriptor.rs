//! A descriptor of the graph API: something with attributes, which is finalized before it is used.

use super::foreign::{self, AttributeName, AttributeType, BackendDescriptor, DescriptorType, Functions};
use crate::error::Error;
use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

/// A descriptor, which ends with this, and what it is for, which errors name.
pub(super) struct Descriptor<'a> {
    functions: &'a Arc<Functions>,
    what: &'a dyn fmt::Display,
    raw: Raw,
}

/// A descriptor that ends with this.
pub(super) struct Raw {
    functions: Arc<Functions>,
    pub(super) pointer: BackendDescriptor,
}

// SAFETY: descriptors belong to no thread.
unsafe impl Send for Raw {}
// SAFETY: what several have is finalized, and only read from there on.
unsafe impl Sync for Raw {}

impl<'a> Descriptor<'a> {
    pub(super) fn new(
        functions: &'a Arc<Functions>,
        what: &'a dyn fmt::Display,
        kind: DescriptorType,
    ) -> Result<Descriptor<'a>, Error> {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        let status = unsafe { (functions.descriptor_create)(kind, &mut pointer) };
        functions.succeeded("cudnnBackendCreateDescriptor", status, what)?;
        Ok(Descriptor { functions, what, raw: Raw { functions: functions.clone(), pointer } })
    }

    /// Sets an attribute of numbers of the library's own.
    pub(super) fn number(
        self,
        name: AttributeName,
        kind: AttributeType,
        value: c_int,
    ) -> Result<Self, Error> {
        self.set(name, kind, &[value])
    }

    pub(super) fn integers(self, name: AttributeName, values: &[i64]) -> Result<Self, Error> {
        self.set(name, foreign::TYPE_INT64, values)
    }

    pub(super) fn float(self, name: AttributeName, value: f32) -> Result<Self, Error> {
        self.set(name, foreign::TYPE_FLOAT, &[value])
    }

    pub(super) fn flag(self, name: AttributeName, value: bool) -> Result<Self, Error> {
        self.set(name, foreign::TYPE_BOOLEAN, &[value])
    }

    /// Sets an attribute of text, of a type that says so.
    #[cfg(test)]
    pub(super) fn text(self, name: AttributeName, kind: AttributeType, text: &str) -> Result<Self, Error> {
        self.set(name, kind, text.as_bytes())
    }

    pub(super) fn pointers(self, name: AttributeName, values: &[u64]) -> Result<Self, Error> {
        self.set(name, foreign::TYPE_VOID_PTR, values)
    }

    pub(super) fn handle(self, name: AttributeName, value: foreign::CudnnHandle) -> Result<Self, Error> {
        self.set(name, foreign::TYPE_HANDLE, &[value])
    }

    pub(super) fn descriptors(self, name: AttributeName, values: &[&Raw]) -> Result<Self, Error> {
        let pointers: Vec<BackendDescriptor> = values.iter().map(|raw| raw.pointer).collect();
        self.set(name, foreign::TYPE_DESCRIPTOR, &pointers)
    }

    fn set<T>(self, name: AttributeName, kind: AttributeType, values: &[T]) -> Result<Self, Error> {
        let (pointer, count) = (self.raw.pointer, values.len() as i64);
        // SAFETY: the descriptor lives, and the call copies as many values of the type as there are; the functions above name
        // the type that belongs to T.
        let status = unsafe { (self.functions.set)(pointer, name, kind, count, values.as_ptr().cast()) };
        self.functions.succeeded("cudnnBackendSetAttribute", status, self.what)?;
        Ok(self)
    }

    /// The descriptor, good to be used.
    pub(super) fn finalize(self) -> Result<Raw, Error> {
        // SAFETY: the descriptor lives.
        let status = unsafe { (self.functions.finalize)(self.raw.pointer) };
        self.functions.succeeded("cudnnBackendFinalize", status, self.what)?;
        Ok(self.raw)
    }

    /// The descriptor as it is, for the library to fill.
    pub(super) fn empty(self) -> Raw {
        self.raw
    }
}

impl Raw {
    /// As many values of an attribute as there is room for; how many there were.
    fn get<T>(
        &self,
        name: AttributeName,
        kind: AttributeType,
        into: &mut [T],
        what: &dyn fmt::Display,
    ) -> Result<usize, Error> {
        let mut count = 0;
        let room = into.len() as i64;
        // SAFETY: the descriptor lives, and the call writes at most as many values as there is room for, of the type that the
        // functions below name.
        let status = unsafe {
            (self.functions.get)(self.pointer, name, kind, room, &mut count, into.as_mut_ptr().cast())
        };
        self.functions.succeeded("cudnnBackendGetAttribute", status, what)?;
        Ok(count.max(0) as usize)
    }

    pub(super) fn integer(&self, name: AttributeName, what: &dyn fmt::Display) -> Result<i64, Error> {
        let mut value = [0_i64];
        self.get(name, foreign::TYPE_INT64, &mut value, what)?;
        Ok(value[0])
    }

    /// Up to ten numbers of the library's own: there are no more kinds of notes.
    pub(super) fn notes(&self, name: AttributeName, what: &dyn fmt::Display) -> Result<Vec<c_int>, Error> {
        let mut values = [0; 10];
        let count = self.get(name, foreign::TYPE_NUMERICAL_NOTE, &mut values, what)?;
        Ok(values[..count.min(values.len())].to_vec())
    }

    /// Lets the library fill descriptors that were made for it; how many it filled.
    pub(super) fn fill(
        &self,
        name: AttributeName,
        into: &[Raw],
        what: &dyn fmt::Display,
    ) -> Result<usize, Error> {
        let mut pointers: Vec<BackendDescriptor> = into.iter().map(|raw| raw.pointer).collect();
        self.get(name, foreign::TYPE_DESCRIPTOR, &mut pointers, what)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by the library and ended nowhere else. It can't be helped if that fails.
        unsafe { (self.functions.descriptor_destroy)(self.pointer) };
    }
}
