//! Values on their way from one device to another, and out of the process as they lie.

use crate::Device;
use crate::device::Backend;
use crate::dtype::{Element, with_element};
use crate::op::Op;
use crate::ops::recorded;
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;

impl Tensor {
    /// A copy on `device`; on the same device, this tensor itself. Its gradient goes back to where this tensor lives. Any two
    /// devices do: between CPUs values keep their order in memory, to and from GPUs they go through the host's memory and become
    /// row-major.
    pub fn to(&self, device: &Device) -> Tensor {
        if self.device() == device {
            return self.clone();
        }
        let out = match (self.device().backend(), device.backend(), self.order()) {
            (Backend::Cpu, Backend::Cpu, Some(order)) => with_element!(self.dtype, T => {
                let from = self.read_dense::<T>();
                Tensor::from_order(device, &from, *self.shape(), order)
            }),
            _ => {
                with_element!(self.dtype, T => Tensor::from_slice(device, &self.to_vec::<T>(), *self.shape()))
            }
        };
        recorded(out, Op::To, &[self], |_| [None])
    }

    /// The order in which the elements follow each other in memory without gaps, if there is one.
    pub fn lies_in(&self) -> Option<Order> {
        self.order()
    }

    /// The elements as they lie in memory, which is in the order that [`Tensor::lies_in`] tells. Panics if `T` isn't the dtype, if
    /// there are gaps between them, or if they are a GPU's.
    #[track_caller]
    pub fn with_lying<T: Element, R>(&self, f: impl FnOnce(&[T]) -> R) -> R {
        f(&self.read_dense::<T>())
    }

    /// The way back from [`Tensor::with_lying`]: a copy of `values` that lies in `order`. Panics if their number isn't that of the
    /// shape, or if the device is a GPU.
    #[track_caller]
    pub fn from_order<T: Element>(
        device: &Device,
        values: &[T],
        shape: impl Into<Shape>,
        order: Order,
    ) -> Tensor {
        let shape = shape.into();
        assert!(values.len() == shape.count(), "from_order: {} values for shape {shape}", values.len());
        let out = Tensor::stale_in(order, device, shape, T::DTYPE);
        out.write::<T>()[..values.len()].copy_from_slice(values);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Philox, backward};

    fn random(device: &Device, shape: &[usize]) -> Tensor {
        Tensor::uniform(device, shape, -1.0, 1.0, DType::F32, Philox::new(1, 2))
    }

    #[test]
    fn a_copy_on_another_device_lies_as_what_was_copied() {
        let (a, b) = (Device::cpu(1), Device::cpu(2));
        let x = random(&a, &[2, 3, 4, 5]);
        for order in [Order::RowMajor, Order::Pixels, Order::Taps] {
            let x = x.arranged(order);
            let y = x.to(&b);
            assert!(y.device() == &b && y.lies_in() == Some(order));
            assert_eq!(y.to_vec::<f32>(), x.to_vec::<f32>());
            let z = x.with_lying(|values: &[f32]| Tensor::from_order(&b, values, *x.shape(), order));
            assert_eq!(z.to_vec::<f32>(), x.to_vec::<f32>());
        }
        let view = x.narrow(1, 1, 2);
        assert_eq!(view.to(&b).to_vec::<f32>(), view.to_vec::<f32>());
        assert!(x.to(&a).storage.is(&x.storage), "on its own device a tensor stays where it is");
    }

    #[test]
    fn gradients_go_back_over_devices() {
        let (a, b, c) = (Device::cpu(1), Device::cpu(1), Device::cpu(2));
        let (x, w) = (random(&a, &[4, 3]).requires_grad(), random(&b, &[2, 3]).requires_grad());
        let through = |x: &Tensor, w: &Tensor, [a, b, c]: [&Device; 3]| {
            // There, further on, and back again, where it meets what stayed.
            let y = x.to(b).linear(w, None).tanh();
            (y.to(c).square().to(a) + x.narrow(1, 0, 2)).sum_all()
        };
        let there = through(&x, &w, [&a, &b, &c]).backward();
        let (x1, w1) = (x.detach().requires_grad(), w.detach().to(&a).requires_grad());
        let here = through(&x1, &w1, [&a; 3]).backward();
        for (moved, stayed) in [(&x, &x1), (&w, &w1)] {
            let grad = there.get(moved).unwrap();
            assert!(grad.device() == moved.device());
            assert_eq!(grad.to_vec::<f32>(), here.get(stayed).unwrap().to_vec::<f32>());
        }
    }

    /// Two walks that begin on either side and cross in the middle of each other, many times: neither waits for the other for good.
    #[test]
    fn walks_that_cross_in_both_directions_end() {
        let (a, b) = (Device::cpu(1), Device::cpu(1));
        std::thread::scope(|scope| {
            for (from, to) in [(&a, &b), (&b, &a)] {
                scope.spawn(move || {
                    for _ in 0..300 {
                        let x = Tensor::ones(from, [3], DType::F32).requires_grad();
                        let grads = (x.to(to) * 2.0).to(from).to(to).sum_all().backward();
                        assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [2.0; 3]);
                    }
                });
            }
        });
    }

    /// WALK-OWN over devices: what a walk that began on one device has noted is no other walk's, whatever their numbers.
    #[test]
    fn walks_of_several_devices_do_not_take_each_others_notes() {
        let (a, b) = (Device::cpu(1), Device::cpu(1));
        let x = Tensor::ones(&a, [2], DType::F32).requires_grad();
        for walks in 1..6 {
            // The devices have seen different numbers of walks.
            for _ in 0..walks {
                let grads = (&x * 3.0).sum_all().backward();
                assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [3.0; 2]);
            }
            let mut grads = crate::Gradients::default();
            let y = (x.to(&b) * 5.0 + x.to(&b)).sum_all();
            backward(&[(&y, None)], &mut grads);
            assert_eq!(grads.get(&x).unwrap().to_vec::<f32>(), [6.0; 2]);
        }
    }
}
