//! The tensor: a shared buffer, a view of it, and possibly a place in the graph.

use crate::account::Purpose;
use crate::device::{Backend, Device};
use crate::dtype::{DType, Element, with_element, with_float};
use crate::graph::NodeRef;
use crate::kernel;
use crate::later::{Later, LaterVec, MOST_LATER};
use crate::philox::Philox;
use crate::shape::{Geometry, Order, Shape};
use crate::storage::{Read, Storage, Write};
use std::fmt;
use std::ops::Range;

/// A multi-dimensional array on a device. Cloning is cheap and shares the values; operations return new tensors.
///
/// ```
/// use phalanx_tensor::{Device, Tensor};
/// let device = Device::cpu(1);
/// let x = Tensor::from_slice(&device, &[1f32, 2.0, 3.0, 4.0], [2, 2]);
/// let y = x.matmul(&x.t()) + 1.0;
/// assert_eq!(y.to_vec::<f32>(), [6.0, 12.0, 12.0, 26.0]);
/// ```
#[derive(Clone)]
pub struct Tensor {
    pub(crate) storage: Storage,
    pub(crate) geometry: Geometry,
    pub(crate) dtype: DType,
    pub(crate) node: Option<NodeRef>,
}

impl Tensor {
    /// A row-major tensor of whatever a recycled buffer holds: for outputs that a kernel fills whole.
    pub(crate) fn stale(device: &Device, shape: Shape, dtype: DType) -> Tensor {
        Tensor::over(Storage::stale(device, shape.count() * dtype.bytes()), shape, dtype)
    }

    /// A row-major tensor over the start of a buffer.
    pub(crate) fn over(storage: Storage, shape: Shape, dtype: DType) -> Tensor {
        Tensor { storage, geometry: Geometry::row_major(shape), dtype, node: None }
    }

    /// As [`Tensor::stale`], in this order.
    #[track_caller]
    pub(crate) fn stale_in(order: Order, device: &Device, shape: Shape, dtype: DType) -> Tensor {
        Tensor { geometry: Geometry::dense(shape, order), ..Tensor::stale(device, shape, dtype) }
    }

    /// Room for as many elements as this tensor has, in the order of this tensor, which is dense.
    pub(crate) fn stale_like(&self) -> Tensor {
        Tensor::stale_in(self.dense_order(), self.device(), *self.shape(), self.dtype)
    }

    /// The same buffer seen through another geometry, outside of the graph.
    pub(crate) fn seen_as(&self, geometry: Geometry) -> Tensor {
        Tensor { storage: self.storage.clone(), geometry, dtype: self.dtype, node: None }
    }

    /// A copy of the elements in memory of its own, outside of the graph that leads to them.
    pub fn copied(&self) -> Tensor {
        let copy = Tensor::stale(self.device(), *self.shape(), self.dtype);
        copy.copy_from(self);
        copy
    }

    /// All elements 0.
    pub fn zeros(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::full(device, shape, 0.0, dtype)
    }

    /// All elements 1.
    pub fn ones(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Tensor {
        Tensor::full(device, shape, 1.0, dtype)
    }

    /// All elements `value`, converted to `dtype`.
    pub fn full(device: &Device, shape: impl Into<Shape>, value: f64, dtype: DType) -> Tensor {
        let out = Tensor::stale(device, shape.into(), dtype);
        out.fill(value);
        out
    }

    /// One element, without dimensions.
    pub fn scalar(device: &Device, value: f64, dtype: DType) -> Tensor {
        Tensor::full(device, [], value, dtype)
    }

    /// The whole numbers of a range, as i64.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// assert_eq!(Tensor::arange(&Device::cpu(1), 2..5).to_vec::<i64>(), [2, 3, 4]);
    /// ```
    pub fn arange(device: &Device, range: Range<i64>) -> Tensor {
        let values: Vec<i64> = range.collect();
        Tensor::constant(device, &values, [values.len()])
    }

    /// A copy of `values` in row-major order. Panics if their number isn't that of the shape.
    #[track_caller]
    pub fn from_slice<T: Element>(device: &Device, values: &[T], shape: impl Into<Shape>) -> Tensor {
        let shape = shape.into();
        assert!(values.len() == shape.count(), "from_slice: {} values for shape {shape}", values.len());
        let out = Tensor::stale(device, shape, T::DTYPE);
        match device.backend() {
            Backend::Cpu => out.write::<T>()[..values.len()].copy_from_slice(values),
            Backend::Gpu(engine) => engine.put(values, &out),
        }
        out
    }

    /// Has the memory that it lies in be counted as held for this, as an error about memory tells.
    pub fn held_for(self, purpose: Purpose) -> Tensor {
        let storage = self.storage.clone().held_for(purpose);
        Tensor { storage, ..self }
    }

    /// Independent numbers, evenly distributed in [low, high), which in 16 bits may round to `high`: element `i` is a function of `key` and `i` alone.
    pub fn uniform(
        device: &Device,
        shape: impl Into<Shape>,
        low: f64,
        high: f64,
        dtype: DType,
        key: Philox,
    ) -> Tensor {
        let out = Tensor::stale(device, shape.into(), dtype);
        if let Backend::Gpu(engine) = device.backend() {
            engine.uniform(low, high, key, &out);
            return out;
        }
        if dtype.is_half() {
            return Tensor::uniform(device, *out.shape(), low, high, DType::F32, key).cast(dtype);
        }
        with_float!(dtype, "uniform", T => {
            let values = &mut out.write::<T>()[..out.count()];
            // A double just below `high` may round to `high` itself.
            let largest = (high as T).next_down().max(low as T);
            for (i, v) in values.iter_mut().enumerate() {
                *v = largest.min((low + (high - low) * f64::from(key.unit(i as u64))) as T);
            }
        });
        out
    }

    /// Independent numbers of the normal distribution: element `i` is a function of `key` and `i` alone (Box and Muller).
    pub fn normal(
        device: &Device,
        shape: impl Into<Shape>,
        mean: f64,
        std: f64,
        dtype: DType,
        key: Philox,
    ) -> Tensor {
        let out = Tensor::stale(device, shape.into(), dtype);
        if let Backend::Gpu(engine) = device.backend() {
            engine.normal(mean, std, key, &out);
            return out;
        }
        if dtype.is_half() {
            return Tensor::normal(device, *out.shape(), mean, std, DType::F32, key).cast(dtype);
        }
        with_float!(dtype, "normal", T => {
            let values = &mut out.write::<T>()[..out.count()];
            for (i, v) in values.iter_mut().enumerate() {
                let [a, b, ..] = key.block(i as u64);
                // 1 - u lies in (0, 1], so the logarithm is finite.
                let radius = (-2.0 * (1.0 - f64::from(crate::philox::unit(a))).ln()).sqrt();
                *v = T::from_f64(mean + std * radius * (std::f64::consts::TAU * f64::from(crate::philox::unit(b))).cos());
            }
        });
        out
    }

    /// The size of each dimension, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.geometry.shape
    }

    /// The sizes as a slice.
    pub fn dims(&self) -> &[usize] {
        self.geometry.shape.dims()
    }

    /// The size of dimension `dim`.
    #[track_caller]
    pub fn dim(&self, dim: usize) -> usize {
        self.check_dim("dim", dim);
        self.dims()[dim]
    }

    /// How many elements there are.
    pub fn count(&self) -> usize {
        self.geometry.shape.count()
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the tensor lives.
    pub fn device(&self) -> &Device {
        self.storage.device()
    }

    /// The only element, as a double. Panics if there are more or fewer.
    #[track_caller]
    pub fn item(&self) -> f64 {
        self.item_later().item()
    }

    /// The single element, which a GPU brings while the host does something else: as it is behind the work that was given so far, whatever
    /// becomes of the tensor.
    ///
    /// ```
    /// use phalanx_tensor::{Device, Tensor};
    /// let mean = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0], [2]).mean_all();
    /// let later = mean.item_later();
    /// assert_eq!(later.item(), 1.5);
    /// ```
    #[track_caller]
    pub fn item_later(&self) -> Later {
        assert!(self.count() == 1, "item: needs a single element, got shape {}", self.shape());
        match self.device().backend() {
            Backend::Cpu => {
                Later::here(with_element!(self.dtype, T => self.read::<T>()[self.geometry.offset].to_f64()))
            }
            Backend::Gpu(engine) => Later::coming(self, engine.get_later(self)),
        }
    }

    /// As [`Tensor::to_vec`] of a few elements, which a GPU brings while the host does something else: see [`Tensor::item_later`]. More
    /// than 64 KiB are waited for.
    #[track_caller]
    pub fn to_vec_later<T: Element>(&self) -> LaterVec<T> {
        match self.device().backend() {
            Backend::Cpu => LaterVec::here(self.to_vec()),
            Backend::Gpu(engine) if self.count() * self.dtype.bytes() <= MOST_LATER => {
                assert!(
                    self.dtype == T::DTYPE,
                    "to_vec_later: the tensor holds {}, was asked for {}",
                    self.dtype,
                    T::DTYPE
                );
                let whole = self.detach().contiguous();
                LaterVec::coming(&whole, engine.get_later(&whole))
            }
            Backend::Gpu(_) => LaterVec::here(self.to_vec()),
        }
    }

    /// A copy of the elements in row-major order. Panics if `T` isn't the tensor's dtype.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        if let Backend::Gpu(engine) = self.device().backend() {
            return engine.get(&self.detach().contiguous());
        }
        let source = self.read::<T>();
        let mut out = Vec::with_capacity(self.count());
        crate::shape::for_each_row([&self.geometry], |[at], [step], n| match step {
            1 => out.extend_from_slice(&source[at..at + n]),
            _ => out.extend((0..n).map(|i| source[at + i * step])),
        });
        out
    }

    /// The elements, on a CPU without a copy. Panics if the tensor isn't contiguous or `T` isn't its dtype.
    #[track_caller]
    pub fn with_slice<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> R {
        match self.device().backend() {
            Backend::Cpu => f(self.read_contiguous::<T>("with_slice").as_ref()),
            Backend::Gpu(engine) => f(&engine.get(self)),
        }
    }

    /// Lets `f` overwrite the elements in place; on a GPU a copy of them, which is put back. Panics if the tensor isn't contiguous, is
    /// in use, or `T` isn't its dtype.
    #[track_caller]
    pub fn with_slice_mut<T: Element, R>(&self, f: impl FnOnce(&mut [T]) -> R) -> R {
        assert!(
            self.geometry.is_contiguous(),
            "with_slice_mut: needs a row-major tensor, got one of shape {} that lies otherwise: copy_from writes to any",
            self.shape()
        );
        if let Backend::Gpu(engine) = self.device().backend() {
            let mut values = engine.get(self);
            let given = f(&mut values);
            engine.put(&values, self);
            return given;
        }
        let span = self.geometry.offset..self.geometry.offset + self.count();
        f(&mut self.write::<T>()[span])
    }

    /// Overwrites every element with `value`. Panics as [`Tensor::copy_from`] does.
    #[track_caller]
    pub fn fill(&self, value: f64) {
        match self.order() {
            Some(_) => kernel::copy::fill(self, value),
            None => {
                self.copy_from(&Tensor::scalar(self.device(), value, self.dtype).broadcast_to(*self.shape()))
            }
        }
    }

    /// Overwrites the elements with those of `other`, which has the same shape and dtype. Panics if several elements of this
    /// tensor are one in memory, as [`Tensor::broadcast_to`] makes them.
    #[track_caller]
    pub fn copy_from(&self, other: &Tensor) {
        self.check_like("copy_from", other);
        let repeats = self.dims().iter().zip(self.geometry.strides).any(|(&n, stride)| n > 1 && stride == 0);
        assert!(
            !repeats,
            "copy_from: elements of the target of shape {} are repeated from one place: copy into a whole tensor",
            self.shape()
        );
        kernel::copy::copy(other, self);
    }

    /// Adds the elements of `other` in place; same shape and dtype.
    #[track_caller]
    pub(crate) fn add_from(&self, other: &Tensor) {
        self.check_like("add_from", other);
        let other = other.arranged(self.dense_order());
        kernel::elementwise::add_assign(self, &other);
    }

    /// The sum of two gradients, in the memory of the first where nobody else holds it.
    pub(crate) fn plus_in_place(self, other: &Tensor) -> Tensor {
        if self.storage.is_unique() && self.order().is_some() {
            self.add_from(other);
            return self;
        }
        self.add(other)
    }

    /// The same values where nobody else sees them be written, without gaps: a copy unless they lie so already.
    pub(crate) fn into_own(self) -> Tensor {
        if self.storage.is_unique() && self.order().is_some() {
            return self;
        }
        let own = Tensor::stale(self.device(), *self.shape(), self.dtype);
        own.copy_from(&self);
        own
    }

    /// The whole buffer for reading; elements start at the geometry's offset.
    #[track_caller]
    pub(crate) fn read<T: Element>(&self) -> Read<'_, T> {
        assert!(self.dtype == T::DTYPE, "tensor: holds {}, was asked for {}", self.dtype, T::DTYPE);
        self.storage.read()
    }

    /// The whole buffer for writing; elements start at the geometry's offset.
    #[track_caller]
    pub(crate) fn write<T: Element>(&self) -> Write<'_, T> {
        assert!(self.dtype == T::DTYPE, "tensor: holds {}, was asked for {}", self.dtype, T::DTYPE);
        self.storage.write()
    }

    /// Exactly the elements of a contiguous tensor.
    #[track_caller]
    pub(crate) fn read_contiguous<T: Element>(&self, op: &str) -> Elements<'_, T> {
        assert!(
            self.geometry.is_contiguous(),
            "{op}: needs a contiguous tensor, got a view of shape {}",
            self.shape()
        );
        Elements { buffer: self.read(), offset: self.geometry.offset, count: self.count() }
    }

    /// Exactly the elements of a tensor that is dense in some order.
    #[track_caller]
    pub(crate) fn read_dense<T: Element>(&self) -> Elements<'_, T> {
        self.dense_order();
        Elements { buffer: self.read(), offset: self.geometry.offset, count: self.count() }
    }

    /// Exactly the elements of an output that is dense in some order.
    #[track_caller]
    pub(crate) fn write_whole<T: Element>(&self) -> ElementsMut<'_, T> {
        debug_assert!(self.order().is_some());
        ElementsMut { offset: self.geometry.offset, count: self.count(), buffer: self.write() }
    }

    /// The order that the elements follow each other in without gaps, if there is one.
    pub(crate) fn order(&self) -> Option<Order> {
        self.geometry.order_among(self.device().orders())
    }

    /// The order of a tensor that is known to be dense.
    #[track_caller]
    pub(crate) fn dense_order(&self) -> Order {
        self.order()
            .unwrap_or_else(|| panic!("a view of shape {} with gaps between its elements", self.shape()))
    }

    #[track_caller]
    pub(crate) fn check_dim(&self, op: &str, dim: usize) {
        assert!(dim < self.shape().n_dims(), "{op}: dimension {dim} of a tensor of shape {}", self.shape());
    }

    #[track_caller]
    pub(crate) fn check_like(&self, op: &str, other: &Tensor) {
        assert!(self.shape() == other.shape(), "{op}: shapes {} and {} differ", self.shape(), other.shape());
        self.check_partner(op, other);
    }

    /// Panics unless both tensors have one dtype and one device.
    #[track_caller]
    pub(crate) fn check_partner(&self, op: &str, other: &Tensor) {
        assert!(self.dtype == other.dtype, "{op}: dtypes {} and {} differ", self.dtype, other.dtype);
        assert!(
            self.device() == other.device(),
            "{op}: the tensors of shapes {} and {} live on different devices",
            self.shape(),
            other.shape()
        );
    }
}

/// The elements of a contiguous tensor, borrowed.
pub(crate) struct Elements<'a, T> {
    buffer: Read<'a, T>,
    offset: usize,
    count: usize,
}

impl<T> AsRef<[T]> for Elements<'_, T> {
    fn as_ref(&self) -> &[T] {
        &self.buffer[self.offset..self.offset + self.count]
    }
}

impl<T> std::ops::Deref for Elements<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.as_ref()
    }
}

/// The elements of an output, borrowed to write.
pub(crate) struct ElementsMut<'a, T> {
    buffer: Write<'a, T>,
    offset: usize,
    count: usize,
}

impl<T> std::ops::Deref for ElementsMut<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.buffer[self.offset..self.offset + self.count]
    }
}

impl<T> std::ops::DerefMut for ElementsMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[self.offset..self.offset + self.count]
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        write!(f, "Tensor({} {}", self.dtype, self.shape())?;
        with_element!(self.dtype, T => {
            let values = self.to_vec::<T>();
            write!(f, " {:?}", &values[..values.len().min(SHOWN)])?;
            if values.len() > SHOWN { f.write_str("...")?; }
        });
        f.write_str(")")
    }
}
