//! The gradient table: for each row of [`crate::op::Op`], the gradients of its inputs from the gradient of its output.
//!
//! Formulas are written with the kernels directly, or with operations on tensors that are outside of the graph and so record
//! nothing. A gradient that a kernel fills whole is written where [`Wanted::place`] says.

use crate::cpu;
use crate::device::Backend;
use crate::dtype::DType;
use crate::gpu;
use crate::graph::{MAX_INPUTS, Saved};
use crate::kernel;
use crate::op::{Form, Op, Unary};
use crate::ops::attention::{Dropped, Shares, apart, room_like};
use crate::ops::convolution::{conv_plan, pool_planes};
use crate::ops::recurrent::{Step, befores, place};
use crate::ops::reduce::{Keep, Toward};
use crate::shape::{Order, Shape};
use crate::tensor::Tensor;
use crate::walk::Wanted;

type Grads = [Option<Tensor>; MAX_INPUTS];

/// The gradients of the first inputs; the others have none.
fn of<const N: usize>(first: [Option<Tensor>; N]) -> Grads {
    let mut grads = Grads::default();
    grads.iter_mut().zip(first).for_each(|(to, grad)| *to = grad);
    grads
}

/// Saved value `i`; a missing one is a fault of the op that recorded.
#[track_caller]
fn value(saved: &Saved, i: usize) -> &Tensor {
    saved[i].as_ref().expect("the op kept what its gradient needs")
}

/// The gradients of the op's inputs, where wanted.
pub(crate) fn gradient(op: &Op, grad: &Tensor, saved: &Saved, wanted: &Wanted<'_>) -> Grads {
    let dtype = grad.dtype();
    let device = grad.device();
    // Runs `f` on a place of this type, in this order, for input `i`'s gradient, if it wants one.
    let filled_as = |dtype: DType, order: Order, i: usize, shape: &Shape, f: &dyn Fn(&Tensor)| {
        wanted.wants(i).then(|| {
            let out = wanted.place(i, order, *shape, dtype);
            f(&out);
            out
        })
    };
    let filled_in =
        |order: Order, i: usize, shape: &Shape, f: &dyn Fn(&Tensor)| filled_as(dtype, order, i, shape, f);
    // The gradient of an input of this type that the op's own was made of by a cast.
    let cast_back = |dtype: DType, i: usize| {
        let grad = grad.dense();
        filled_as(dtype, grad.dense_order(), i, grad.shape(), &|out| wanted.cast(i, &grad, out))
    };
    let filled = |i: usize, shape: &Shape, f: &dyn Fn(&Tensor)| filled_in(Order::RowMajor, i, shape, f);
    let filled_unless = |added: &Option<Tensor>, i: usize, shape: &Shape, f: &dyn Fn(&Tensor)| {
        if added.is_some() { None } else { filled(i, shape, f) }
    };
    let filled_like =
        |i: usize, like: &Tensor, f: &dyn Fn(&Tensor)| filled_in(like.dense_order(), i, like.shape(), f);
    match *op {
        Op::Unary(f) => {
            let grad =
                if f.keeps_nothing() { grad.dense() } else { grad.arranged(value(saved, 0).dense_order()) };
            let kept = if f.keeps_nothing() { &grad } else { value(saved, 0) };
            of([filled_like(0, &grad, &|out| kernel::elementwise::unary_gradient(f, kept, &grad, out))])
        }
        Op::Add(a, b) => {
            of([wanted.wants(0).then(|| grad.sum_to(&a)), wanted.wants(1).then(|| grad.sum_to(&b))])
        }
        Op::AddHalf(half) => {
            let rounded = wanted.rounded.clone().filter(|_| wanted.wants(1));
            of([wanted.wants(0).then(|| grad.clone()), rounded.or_else(|| cast_back(half, 1))])
        }
        Op::Sub(a, b) => {
            of([wanted.wants(0).then(|| grad.sum_to(&a)), wanted.wants(1).then(|| grad.sum_to(&b).neg())])
        }
        Op::Mul(a, b) => of([
            wanted.wants(0).then(|| grad.mul(value(saved, 1)).sum_to(&a)),
            wanted.wants(1).then(|| grad.mul(value(saved, 0)).sum_to(&b)),
        ]),
        Op::Div(a, b) => of([
            wanted.wants(0).then(|| grad.div(value(saved, 0)).sum_to(&a)),
            // d(a / b)/db = -(a / b) / b
            wanted.wants(1).then(|| grad.mul(value(saved, 1)).div(value(saved, 0)).neg().sum_to(&b)),
        ]),
        Op::Maximum(a, b) | Op::Minimum(a, b) => {
            let sign = if matches!(op, Op::Maximum(..)) { 1.0 } else { -1.0 };
            let side = |mine: usize, shape: Shape| {
                wanted.wants(mine).then(|| {
                    let out = Tensor::stale(device, *grad.shape(), dtype);
                    kernel::elementwise::winner_gradient(
                        value(saved, mine),
                        value(saved, 1 - mine),
                        grad,
                        sign,
                        &out,
                    );
                    out.sum_to(&shape)
                })
            };
            of([side(0, a), side(1, b)])
        }
        Op::Sum { from, kept } => of([Some(grad.reshape(kept).broadcast_to(from))]),
        Op::Max { from, dim } => {
            of([filled(0, &from, &|out| kernel::reduce::max_gradient(grad, value(saved, 0), dim, out))])
        }
        Op::Choose(yes, no) => {
            let (mask, nothing) = (value(saved, 0), Tensor::zeros(device, [], dtype));
            of([
                wanted.wants(0).then(|| mask.where_cond(grad, &nothing).sum_to(&yes)),
                wanted.wants(1).then(|| mask.where_cond(&nothing, grad).sum_to(&no)),
            ])
        }
        Op::Gather { from, dim } => {
            let (index, grad) = (value(saved, 0), grad.contiguous());
            of([filled(0, &from, &|out| kernel::choice::gather_gradient(&grad, index, dim, out))])
        }
        Op::Scatter { dim } => of([Some(grad.gather(dim, value(saved, 0)))]),
        Op::RunningSum { dim } => {
            let grad = grad.contiguous();
            of([filled(0, grad.shape(), &|out| {
                kernel::reduce::running_sums(&grad, dim, Toward::Beginning, out)
            })])
        }
        Op::Reshape(from) => {
            let seen = grad.geometry.with_ones(from).map(|geometry| grad.seen_as(geometry));
            of([Some(seen.unwrap_or_else(|| grad.reshape(from)))])
        }
        Op::Permute(back) => {
            let order = back.map(usize::from);
            of([Some(grad.permute(&order[..grad.shape().n_dims()]))])
        }
        Op::Narrow { from, dim, start } => {
            // What has come from other stretches of the same takes this one in: each would else be as large as all of them.
            let others = wanted.received(0, (device, &from, dtype), |sum| sum.storage.is_unique());
            let out = others.as_ref().map_or_else(|| Tensor::zeros(device, from, dtype), Tensor::clone);
            let stretch = out.seen_as(out.geometry.narrow(dim, start, grad.dims()[dim]));
            match others {
                Some(_) => kernel::copy::copy(&stretch.detach().add(grad), &stretch),
                None => kernel::copy::copy(grad, &stretch),
            }
            of([Some(out)])
        }
        Op::Flip { dim } => of([Some(grad.flip(dim))]),
        Op::Pad { dim, start, len } => of([Some(grad.narrow(dim, start, len))]),
        Op::Broadcast(from) => of([Some(grad.sum_to(&from))]),
        Op::Arrange => of([Some(grad.clone())]),
        Op::To => of([wanted.wants(0).then(|| grad.to(&wanted.device_of(0)))]),
        Op::Cast(from) => of([cast_back(from, 0)]),
        Op::Across => {
            let crossing = wanted.crossing.as_ref().expect("the op kept who knows the way back");
            of([Some(crossing.back(grad))])
        }
        Op::Again => unreachable!("the walk puts a graph in its place"),
        Op::Cat { dim, middle } => {
            let rest = grad.dims()[dim] - middle;
            of([
                wanted.wants(0).then(|| grad.narrow(dim, 0, middle)),
                wanted.wants(1).then(|| grad.narrow(dim, middle, rest)),
            ])
        }
        // With c = a b: da = dc b^T and db = a^T dc, summed over the batch dimensions that were broadcast.
        Op::Matmul(a, b) => of([
            wanted.wants(0).then(|| grad.matmul(&value(saved, 1).t()).sum_to(&a)),
            wanted.wants(1).then(|| value(saved, 0).t().matmul(grad).sum_to(&b)),
        ]),
        Op::Linear(x, w) => {
            let grad = grad.contiguous();
            let bias = Shape::new(&w.dims()[..1]);
            let grad_b = wanted.wants(2).then(|| wanted.place(2, Order::RowMajor, bias, dtype));
            let added = added_to_weight(wanted, &grad, || [&grad, value(saved, 0)]);
            let whole = filled_unless(&added, 1, &w, &|out| {
                kernel::matmul::linear_weight_gradient(&grad, value(saved, 0), grad_b.as_ref(), out);
            });
            if let (Some(grad_b), None) = (&grad_b, &whole) {
                sum_rows(&grad, grad_b);
            }
            of([
                filled(0, &x, &|out| kernel::matmul::linear_input_gradient(&grad, value(saved, 1), out)),
                added.or(whole),
                grad_b,
            ])
        }
        Op::LinearInOut(x, w) | Op::GeluLinearInOut(x, w) => {
            let grad = grad.contiguous();
            let bias = Shape::new(&w.dims()[1..]);
            let grad_b = wanted.wants(2).then(|| wanted.place(2, Order::RowMajor, bias, dtype));
            let added = added_to_weight(wanted, &grad, || [value(saved, 0), &grad]);
            let whole = filled_unless(&added, 1, &w, &|out| {
                kernel::matmul::linear_in_out_weight_gradient(&grad, value(saved, 0), grad_b.as_ref(), out);
            });
            if let (Some(grad_b), None) = (&grad_b, &whole) {
                sum_rows(&grad, grad_b);
            }
            let grad_x = filled(0, &x, &|out| {
                let w = value(saved, 1).t();
                match (op, device.backend()) {
                    (Op::LinearInOut(..), _) => kernel::matmul::linear_input_gradient(&grad, &w, out),
                    (_, Backend::Gpu(engine)) => {
                        gpu::matmul::linear_gelu_gradient(engine, &grad, &w, value(saved, 2), out);
                    }
                    (_, Backend::Cpu) => unreachable!("GELU is an operation of its own on a CPU"),
                }
            });
            of([grad_x, added.or(whole), grad_b])
        }
        Op::Conv2d(options) => {
            let (x, w) = (value(saved, 0), value(saved, 1));
            let plan = conv_plan(x.shape(), w.shape(), options);
            let grad = grad.arranged(device.conv_orders(&plan)[2]);
            let grad_b = filled(2, &[plan.o].into(), &|out| kernel::conv::bias_gradient(&grad, plan, out));
            let grad_w = filled_like(1, w, &|out| kernel::conv::kernel_gradient(x, &grad, plan, out));
            let grad_x = filled_like(0, x, &|out| kernel::conv::image_gradient(&grad, w, plan, out));
            of([grad_x, grad_w, grad_b])
        }
        Op::ConvTranspose2d(options) => {
            let (x, w) = (value(saved, 0), value(saved, 1));
            let plan = conv_plan(grad.shape(), w.shape(), options);
            let grad = grad.arranged(device.conv_orders(&plan)[0]);
            let grad_w = filled_like(1, w, &|out| kernel::conv::kernel_gradient(&grad, x, plan, out));
            let grad_x = filled_like(0, x, &|out| kernel::conv::forward(&grad, w, None, plan, out));
            of([grad_x, grad_w])
        }
        Op::Lstm { toward } => {
            let [states, w, gates, cells] = [0, 1, 2, 3].map(|i| value(saved, i));
            let &[n, batch, width] = gates.dims() else { unreachable!("the op checks its shapes") };
            let state = [batch, width / 4].into();
            let grad = grad.contiguous();
            let of_x = wanted.place_or_stale(0, *gates.shape(), dtype);
            let later = Tensor::zeros(device, state, dtype);
            let of_cell = Tensor::stale(device, state, cells.dtype);
            kernel::copy::copy(&place(&grad, n + 1).cast(cells.dtype), &of_cell);
            for step in Step::all(n, toward).rev() {
                kernel::recurrent::lstm_step_gradient(gates, cells, step, [&grad, &later], &of_cell, &of_x);
                kernel::matmul::linear_input_gradient(&place(&of_x, step.position), w, &later);
            }
            let of_w = filled(1, w.shape(), &|out| {
                let befores = states.narrow(0, befores(n, toward)[0], n).reshape([n * batch, width / 4]);
                let of_gates = of_x.reshape([n * batch, width]);
                kernel::matmul::linear_weight_gradient(&of_gates, &befores, None, out);
            });
            of([
                wanted.wants(0).then_some(of_x),
                of_w,
                wanted.wants(2).then_some(later),
                wanted.wants(3).then(|| of_cell.cast(dtype)),
            ])
        }
        Op::Gru { toward } => {
            let [states, w, gates] = [0, 1, 2].map(|i| value(saved, i));
            let &[n, batch, width] = gates.dims() else { unreachable!("the op checks its shapes") };
            let (width, grad) = (width / 4, grad.contiguous());
            let shape: Shape = [n, batch, 3 * width].into();
            let (of_x, of_product) =
                (wanted.place_or_stale(0, shape, dtype), Tensor::stale(device, shape, dtype));
            let later = Tensor::zeros(device, [batch, width], dtype);
            let more = later.stale_like();
            for step in Step::all(n, toward).rev() {
                let outs = [&of_x, &of_product];
                kernel::recurrent::gru_step_gradient(gates, states, step, [&grad, &later], outs);
                kernel::matmul::linear_input_gradient(&place(&of_product, step.position), w, &more);
                kernel::elementwise::add_assign(&later, &more);
            }
            let rows = of_product.reshape([n * batch, 3 * width]);
            let of_w = filled(1, w.shape(), &|out| {
                let befores = states.narrow(0, befores(n, toward)[0], n).reshape([n * batch, width]);
                kernel::matmul::linear_weight_gradient(&rows, &befores, None, out);
            });
            let of_b = filled(2, &[3 * width].into(), &|out| sum_rows(&rows, out));
            of([wanted.wants(0).then_some(of_x), of_w, of_b, wanted.wants(3).then_some(later)])
        }
        Op::MaxPool2d { from, order, options } => {
            let (planes, _) = pool_planes("max_pool2d", &from, options);
            // The position of a 1x1 image is dense in both orders, and so says less than `order`.
            let (position, grad) = (value(saved, 0), grad.arranged(order));
            of([filled_in(order, 0, &from, &|out| {
                kernel::pooling::max_pool_gradient(position, &grad, planes, order, out);
            })])
        }
        Op::AvgPool2d { from, options, padding } => {
            let (planes, _) = pool_planes("avg_pool2d", &from, options);
            let order = device.image_order();
            let grad = grad.arranged(order);
            of([filled_in(order, 0, &from, &|out| {
                kernel::pooling::avg_pool_gradient(&grad, planes, padding, out);
            })])
        }
        Op::Resample { from, dim } => {
            let (grad, table) = (grad.dense(), value(saved, 0));
            of([filled_in(grad.dense_order(), 0, &from, &|out| {
                kernel::resample::resample(&grad, dim, table, out);
            })])
        }
        Op::Softmax { dim } | Op::LogSoftmax { dim } => {
            let form = if matches!(op, Op::Softmax { .. }) { Form::Softmax } else { Form::LogSoftmax };
            let (y, grad) = (value(saved, 0), grad.contiguous());
            of([filled(0, y.shape(), &|out| {
                kernel::softmax::softmax_gradient(form, y, &grad, y.dims()[dim], out)
            })])
        }
        Op::NllLoss { from } => {
            of([filled(0, &from, &|out| kernel::loss::nll_gradient(value(saved, 0), grad, out))])
        }
        Op::CrossEntropy { label_smoothing } => {
            // Logits of 16 bits may have a loss in f32, and their gradient is of their own type.
            let (from, labels, shifts) = (value(saved, 0), value(saved, 1), saved[2].as_ref());
            // On a GPU it goes where the logits lie, if nobody else has these: of many words they are the largest tensor of a pass, and are
            // there when all else that is kept is.
            let is_free = matches!(device.backend(), Backend::Gpu(_)) && from.storage.is_unique();
            of([wanted.wants(0).then(|| {
                let out = match is_free {
                    true => wanted.place_or(0, Order::RowMajor, from.clone()),
                    false => wanted.place(0, Order::RowMajor, *from.shape(), from.dtype()),
                };
                kernel::loss::cross_entropy_gradient(from, shifts, labels, label_smoothing, grad, &out);
                out
            })])
        }
        Op::MseLoss => {
            let (x, t) = (value(saved, 0), value(saved, 1));
            of([
                filled(0, x.shape(), &|out| kernel::loss::mse_gradient(x, t, grad, out)),
                filled(1, t.shape(), &|out| kernel::loss::mse_gradient(t, x, grad, out)),
            ])
        }
        Op::BceWithLogits => {
            let (x, t) = (value(saved, 0), value(saved, 1));
            of([filled(0, x.shape(), &|out| kernel::loss::bce_gradient(x, t, grad, out))])
        }
        Op::Embedding { table, start } => {
            let (grad, ids) = (grad.contiguous(), value(saved, 0));
            of([filled(0, &table, &|out| kernel::embedding::embedding_gradient(&grad, start, ids, out))])
        }
        Op::Attention { sight, first, dropout } => {
            let (x, lse, grad) = (value(saved, 0), value(saved, 2), grad.contiguous());
            let dropped = saved[3].is_some().then(|| Dropped {
                p: dropout,
                key: [value(saved, 3), value(saved, 4)],
                first,
            });
            let shares = Shares { sight, mask: saved[5].as_ref(), dropped };
            let came = [value(saved, 1), lse];
            if saved[6].is_some() {
                let given = [x, value(saved, 6), value(saved, 7)];
                let outs = given.map(room_like);
                kernel::attention::attention_gradient(given, came, shares, &grad, outs.each_ref());
                return of(outs.map(Some));
            }
            let &[_, heads, asking] = lse.dims() else { unreachable!("as the operation made it") };
            let asked = sight.from()..sight.from() + asking;
            of([filled(0, x.shape(), &|out| {
                if asking < x.dims()[1] {
                    // Nobody asked the other queries.
                    kernel::copy::fill(out, 0.0);
                }
                let [given, outs] = [x, out].map(|all| apart(all, heads, asked.clone()));
                kernel::attention::attention_gradient(given.each_ref(), came, shares, &grad, outs.each_ref());
            })])
        }
        Op::Dropout { p } => {
            // Recorded on a GPU alone: see `Tensor::dropout`.
            let Backend::Gpu(engine) = device.backend() else { unreachable!("a CPU multiplies by a mask") };
            let (key, grad) = ([value(saved, 0), value(saved, 1)], grad.contiguous());
            of([filled(0, grad.shape(), &|out| gpu::dropout::dropout(engine, p, key, &grad, out))])
        }
        Op::LayerNorm { row, .. } => {
            let (x, weight, grad) = (value(saved, 0), saved[1].as_ref(), grad.contiguous());
            let stats = [x, value(saved, 2), value(saved, 3)];
            let shape = weight.map_or(Shape::new(&[row]), |weight| *weight.shape());
            let [grad_w, grad_b] = [1, 2]
                .map(|i| wanted.wants(i).then(|| wanted.place(i, Order::RowMajor, shape, dtype.wide())));
            if let Backend::Gpu(engine) = device.backend()
                && gpu::norm::is_held(row)
            {
                let plus = wanted.received(0, (device, x.shape(), x.dtype), |_| true);
                let rounds = |half: &DType| x.dtype == DType::F32 && *half == dtype;
                let halves =
                    wanted.rounds(0).filter(rounds).map(|half| Tensor::stale(device, *x.shape(), half));
                let grad_x = wanted.wants(0).then(|| wanted.place(0, Order::RowMajor, *x.shape(), x.dtype));
                let to = gpu::norm::Gradients {
                    rows: grad_x.as_ref(),
                    plus: plus.as_ref(),
                    halves: halves.as_ref(),
                    parameters: [grad_w.as_ref(), grad_b.as_ref()],
                };
                gpu::norm::layer_norm_gradients(engine, stats, weight, &grad, row, &to);
                halves.into_iter().for_each(|halves| wanted.give_rounded(0, halves));
                return of([grad_x, grad_w, grad_b]);
            }
            let grad_x = filled_as(x.dtype, Order::RowMajor, 0, x.shape(), &|out| {
                kernel::norm::layer_norm_gradient(stats, weight, &grad, row, out)
            });
            kernel::norm::layer_norm_parameter_gradients(stats, &grad, grad_w.as_ref(), grad_b.as_ref());
            of([grad_x, grad_w, grad_b])
        }
        Op::GroupNorm { sizes } => {
            let [x, weight, mean, scale] = [0, 1, 2, 3].map(|i| value(saved, i));
            let (grad, channels) = (grad.contiguous(), weight.count());
            let sums = Tensor::stale(device, [x.dims()[0], channels, 2].into(), dtype);
            let of_x = wanted.place_or_stale(0, *x.shape(), dtype);
            cpu::group_norm::gradient([x, mean, scale], weight, &grad, sizes, [&of_x, &sums]);
            let of_all = |i: usize| sums.narrow(2, i, 1).sum(&[0, 2], Keep::No);
            let wanted_of = |input: usize, of: usize| wanted.wants(input).then(|| of_all(of));
            of([wanted.wants(0).then_some(of_x), wanted_of(1, 1), wanted_of(2, 0)])
        }
        Op::BatchNorm { count, relu } => {
            let (x, weight) = (value(saved, 0), saved[1].as_ref());
            let (mean, scale) = (value(saved, 2), value(saved, 3));
            let mask = relu.then(|| value(saved, 4));
            let shared = wanted.shared.as_ref();
            let goes_along = shared.is_none() && wanted.wants(0);
            let parts = [Some(grad), wanted.more.as_ref()];
            let are_ours = parts.map(|part| part.is_some_and(|part| part.storage.is_unique()));
            let (grad, more) = match &wanted.more {
                Some(more) if !goes_along => (grad.add(more), None),
                more => (grad.clone(), more.as_ref().map(|more| more.arranged(x.dense_order()))),
            };
            let grad = grad.arranged(x.dense_order());
            // On a GPU the gradients of what was normalised and of what was added go where the parts of the output's lie, if nobody else has
            // these: of large images each would take as much memory again, just when most of it is in use.
            let free = |i: usize, arranged: Option<&Tensor>| {
                let is_ours = |own: &&Tensor| {
                    are_ours[i] || parts[i].is_some_and(|part| !part.storage.is(&own.storage))
                };
                let is_on_gpu = matches!(device.backend(), Backend::Gpu(_));
                let fits = |own: &&Tensor| goes_along && is_on_gpu && own.dtype == dtype && is_ours(own);
                arranged.filter(fits).cloned()
            };
            let (in_grad, in_more) = (free(0, Some(&grad)), free(1, more.as_ref()));
            let place_like_x = |i: usize, free: Option<Tensor>| match free {
                Some(free) => wanted.place_or(i, x.dense_order(), free),
                None => wanted.place(i, x.dense_order(), *x.shape(), dtype),
            };
            let channels: Shape = [x.dims()[1]].into();
            let place = |i: usize| wanted.place_or_stale(i, channels, dtype.wide());
            let (grad_b, grad_w) = (place(2), place(1));
            let of_plus = wanted.wants(3).then(|| place_like_x(3, in_more));
            let (stats, of_parameters) = ([mean, scale], [&grad_b, &grad_w]);
            let grad_x = if !goes_along {
                // The gradients of weight and bias are sums that the input's gradient needs too, those of the whole batch.
                let sums = Tensor::stale(device, [2, x.dims()[1]].into(), DType::F64);
                kernel::batch_norm::sums(x, mean, &grad, mask, &sums);
                kernel::batch_norm::channel_gradients(&sums, scale, of_parameters);
                let of_all = shared.map(|shared| (shared.summed(sums), &shared.totals));
                filled_like(0, x, &|out| {
                    let (sums, totals) = of_all.as_ref().expect("else the input's gradient goes along");
                    let outputs = (out, of_plus.as_ref());
                    let of_batch = [sums, totals];
                    kernel::batch_norm::input_gradient_shared(
                        x, stats, weight, &grad, mask, of_batch, outputs,
                    );
                })
            } else {
                let out = place_like_x(0, in_grad);
                let outputs = ((&out, of_plus.as_ref()), of_parameters);
                match (device.backend(), &more) {
                    (Backend::Gpu(engine), Some(more)) => gpu::batch_norm::gradients_of_sum(
                        engine,
                        x,
                        stats,
                        weight,
                        (&grad, Some(more)),
                        mask,
                        count,
                        outputs,
                    ),
                    _ => kernel::batch_norm::gradients(x, stats, weight, &grad, mask, count, outputs),
                }
                Some(out)
            };
            let grad_plus = of_plus.inspect(|out| match mask {
                _ if grad_x.is_some() => {}
                Some(mask) => {
                    debug_assert!(
                        mask.dtype == grad.dtype,
                        "batch_norm: bits where no input wants a gradient"
                    );
                    kernel::elementwise::unary_gradient(Unary::Relu, mask, &grad, out);
                }
                None => out.copy_from(&grad),
            });
            of([grad_x, wanted.wants(1).then_some(grad_w), wanted.wants(2).then_some(grad_b), grad_plus])
        }
    }
}

/// Adds `a^T b`, the gradient of a weight (input 1) from the rows of `[a, b]`, as many as `grad` has, to what other passes have left in
/// its slot, without a product that is written first and added then. That has the same bits where rows are few, which is where it is
/// worth most. Of a weight that learns nothing what would be multiplied wasn't kept.
fn added_to_weight<'a>(
    wanted: &Wanted<'_>,
    grad: &Tensor,
    factors: impl FnOnce() -> [&'a Tensor; 2],
) -> Option<Tensor> {
    if !matches!(grad.device().backend(), Backend::Cpu) {
        return None;
    }
    let slot = wanted.sum(1, grad.dtype()).filter(|slot| cpu::matmul::adds_rows_times_rows(grad, slot))?;
    let [a, b] = factors();
    cpu::matmul::add_rows_times_rows(a, b, &slot);
    Some(slot)
}

/// `out =` the sum of all rows of the contiguous `x`, each as long as `out` is.
fn sum_rows(x: &Tensor, out: &Tensor) {
    let width = out.count();
    kernel::reduce::sum(&x.reshape([x.count() / width.max(1), width]), &out.reshape([1, width]));
}
