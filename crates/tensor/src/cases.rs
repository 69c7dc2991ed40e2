//! What operations are tried on, for all who check them: shapes, and what is made of tensors of them. Tests hold gradients against
//! differences and GPUs against CPUs at these, and so does whoever wants to know whether a device is well.

pub mod alike;
pub mod beside;
pub mod choices;
pub mod edges;
pub mod wide;

use crate::{
    ChannelStats, Conv2dOptions, CountPadding, DType, Device, DropoutKey, Interpolation, Keep, Philox,
    PoolOptions, Tensor, Then, Toward, Within,
};

/// Who checks.
pub trait Check {
    /// Checks `f` and its gradient at random inputs of the given shapes, between -1 and 1 and moved by `shift`.
    ///
    /// By reference: hundreds of cases would else be as many copies of a check, which take a minute to compile.
    #[track_caller]
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor);

    /// As [`Check::check_at`], not moved.
    #[track_caller]
    fn check(&self, shapes: &[&[usize]], f: impl Fn(&[Tensor]) -> Tensor) {
        self.check_at(0.0, shapes, &f);
    }
}

/// Random numbers between -1 and 1, the same on every device, and in every type but for its rounding.
pub fn random(like: &Tensor, shape: &[usize], stream: u64) -> Tensor {
    let (key, n) = (Philox::new(42, stream), shape.iter().product::<usize>());
    let values: Vec<f32> = (0..n).map(|i| 2.0 * key.unit(i as u64) - 1.0).collect();
    match like.dtype() {
        DType::F32 => Tensor::from_slice(like.device(), &values, shape),
        half @ (DType::BF16 | DType::F16) => Tensor::from_slice(like.device(), &values, shape).cast(half),
        _ => Tensor::from_slice(
            like.device(),
            &values.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(),
            shape,
        ),
    }
}

/// A family of operations by name, and what has `C` check it.
pub type Family<C> = (&'static str, fn(&C));

/// Every family of operations.
pub fn families<C: Check>() -> [Family<C>; 22] {
    [
        ("arithmetic broadcasts", arithmetic_broadcasts),
        ("functions", functions),
        ("reductions", reductions),
        ("views", views),
        ("products", products),
        ("convolutions", convolutions),
        ("transposed convolutions", transposed_convolutions),
        ("recurrent layers", recurrent_layers),
        ("pooling", pooling),
        ("interpolations", interpolations),
        ("softmaxes", softmaxes),
        ("losses", losses),
        ("choices", choices::choices),
        ("embedding and norm", embedding_and_norm),
        ("batch norm", batch_norm),
        ("dropouts", dropouts),
        ("attention", attention),
        ("attention of many positions", attention_of_many_positions),
        ("a value used twice gets both gradients", a_value_used_twice_gets_both_gradients),
        ("rows of many numbers", wide::rows_of_many_numbers),
        ("norms of rows", wide::norms_of_rows),
        ("images of many channels", wide::images_of_many_channels),
    ]
}

/// Families that take long on all but a real GPU.
pub fn large_families<C: Check>() -> [Family<C>; 1] {
    [("attention of many blocks", attention_of_many_blocks)]
}

/// The same images in pixel order: the copy is made of a view in which that is the row-major one.
fn in_pixels(x: &Tensor) -> Tensor {
    x.permute(&[2, 3, 0, 1]).contiguous().permute(&[2, 3, 0, 1])
}

/// Some classes.
fn labels(device: &Device, n: usize, classes: usize) -> Tensor {
    let values: Vec<i64> = (0..n).map(|i| (i * 7 % classes) as i64).collect();
    Tensor::from_slice(device, &values, [n])
}

/// Sums, products and the like, of shapes that are spread to each other.
pub fn arithmetic_broadcasts(c: &impl Check) {
    type Binary = fn(&Tensor, &Tensor) -> Tensor;
    let ops: [Binary; 5] = [Tensor::add, Tensor::sub, Tensor::mul, Tensor::maximum, Tensor::minimum];
    for op in ops {
        c.check(&[&[2, 3], &[2, 3]], |x| op(&x[0], &x[1]));
        c.check(&[&[2, 3, 4], &[3, 1]], |x| op(&x[0], &x[1]));
        c.check(&[&[4], &[2, 1, 4]], |x| op(&x[0], &x[1]));
        c.check(&[&[], &[3]], |x| op(&x[0], &x[1]));
        c.check(&[&[3, 3]], |x| op(&x[0], &x[0].t()));
    }
    c.check_at(2.0, &[&[2, 3], &[3]], &|x| x[0].div(&x[1]));
    c.check_at(2.0, &[&[3], &[2, 1]], &|x| x[0].div(&x[1]));
}

/// Functions of each element.
pub fn functions(c: &impl Check) {
    for f in [
        Tensor::neg,
        Tensor::exp,
        Tensor::tanh,
        Tensor::sigmoid,
        Tensor::relu,
        Tensor::gelu,
        Tensor::gelu_tanh,
        Tensor::silu,
        Tensor::softplus,
        Tensor::sin,
        Tensor::cos,
        Tensor::abs,
        Tensor::square,
    ] {
        c.check(&[&[2, 5]], |x| f(&x[0]));
        c.check(&[&[2, 5]], |x| f(&x[0].t()));
    }
    c.check_at(2.0, &[&[7]], &|x| x[0].ln());
    c.check_at(2.0, &[&[7]], &|x| x[0].sqrt());
    c.check_at(2.0, &[&[7]], &|x| x[0].powf(2.5));
    c.check(&[&[2, 5]], |x| x[0].leaky_relu(0.25));
    c.check(&[&[2, 5]], |x| x[0].elu(1.5));
    c.check(&[&[7]], |x| x[0].affine(3.0, -1.0));
    c.check(&[&[3]], |x| -&(&x[0] * 2.0 - 1.0) / 4.0);
}

/// Sums, means and largest elements.
pub fn reductions(c: &impl Check) {
    for keep in [Keep::Yes, Keep::No] {
        c.check(&[&[2, 3, 4]], |x| x[0].sum(&[1], keep));
        c.check(&[&[2, 3, 4]], |x| x[0].sum(&[0, 2], keep));
        c.check(&[&[2, 3, 4]], |x| x[0].mean(&[2], keep));
        c.check(&[&[2, 3, 4]], |x| x[0].max(1, keep));
        c.check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2).max(0, keep));
        c.check(&[&[2, 3, 4]], |x| x[0].var(&[0, 2], keep, 1));
        c.check(&[&[2, 3, 4]], |x| x[0].logsumexp(1, keep));
    }
    c.check(&[&[5, 4]], |x| x[0].std(&[0], Keep::No, 0));
    c.check(&[&[2, 3, 4]], |x| x[0].cumsum(1));
    c.check(&[&[3, 5]], |x| x[0].cumsum(1));
    // More of a row than a block has threads.
    c.check(&[&[2, 1500]], |x| x[0].cumsum(1));
    c.check(&[&[4, 3]], |x| x[0].t().cumsum(1).square());
    c.check(&[&[3, 4]], |x| x[0].sum_all());
    c.check(&[&[3, 4]], |x| x[0].t().mean_all());
}

/// Views, and copies of them.
pub fn views(c: &impl Check) {
    c.check(&[&[2, 3, 4]], |x| x[0].reshape([4, 6]));
    c.check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2).reshape([8, 3]));
    c.check(&[&[2, 3, 4]], |x| x[0].permute(&[2, 0, 1]));
    c.check(&[&[2, 3, 4]], |x| x[0].narrow(1, 1, 2).narrow(2, 0, 3));
    c.check(&[&[2, 1, 4]], |x| x[0].squeeze(1).unsqueeze(0).flatten_from(1));
    c.check(&[&[3, 1]], |x| x[0].broadcast_to([2, 3, 4]));
    c.check(&[&[2, 3], &[2, 1], &[2, 2]], |x| Tensor::cat(&[&x[0], &x[1], &x[2]], 1));
    c.check(&[&[2, 3]], |x| Tensor::cat(&[&x[0], &x[0].affine(2.0, 0.0)], 0));
    c.check(&[&[2, 3], &[2, 3], &[2, 3]], |x| Tensor::stack(&[&x[0], &x[1], &x[2]], 1));
    c.check(&[&[2, 3, 4]], |x| x[0].pad(1, [1, 2], 0.5).pad(2, [0, 1], -1.0));
    (0..3).for_each(|dim| c.check(&[&[2, 3, 4]], |x| x[0].flip(dim)));
    c.check(&[&[2, 3, 4]], |x| x[0].transpose(0, 2).flip(1));
    c.check(&[&[3, 0]], |x| x[0].flip(0));
    c.check(&[&[2, 3, 4]], |x| x[0].tril(0) + x[0].triu(-1));
    // Each stretch of something has its own use, and some have two.
    c.check(&[&[3, 5]], |x| {
        let parts = x[0].square().split(2, 1);
        let sums: Vec<Tensor> = parts.iter().map(|part| part.exp().sum(&[1], Keep::No)).collect();
        &sums[0] * &sums[1] + &sums[2] + parts[2].squeeze(1)
    });
}

/// Matrix products.
pub fn products(c: &impl Check) {
    c.check(&[&[3, 4], &[4, 2]], |x| x[0].matmul(&x[1]));
    c.check(&[&[4, 3], &[4, 2]], |x| x[0].t().matmul(&x[1]));
    c.check(&[&[2, 3, 4], &[2, 4, 2]], |x| x[0].matmul(&x[1]));
    c.check(&[&[2, 1, 3, 4], &[5, 4, 2]], |x| x[0].matmul(&x[1]));
    c.check(&[&[2, 3, 4], &[4, 2]], |x| x[0].matmul(&x[1]));
    c.check(&[&[3, 4], &[2, 4], &[2]], |x| x[0].linear(&x[1], Some(&x[2])));
    c.check(&[&[2, 3, 4], &[5, 4]], |x| x[0].linear(&x[1], None));
    c.check(&[&[3, 4], &[4, 2], &[2]], |x| x[0].linear_in_out(&x[1], Some(&x[2])));
    c.check(&[&[2, 3, 4], &[4, 5]], |x| x[0].linear_in_out(&x[1], None));
    c.check(&[&[2, 1], &[1, 3], &[3]], |x| x[0].linear_in_out(&x[1], Some(&x[2])));
    // On GPUs, GELU is part of the products where its rows are a multiple of 8 elements.
    for hidden in [8, 6] {
        c.check(&[&[3, 4], &[4, hidden], &[hidden], &[hidden, 2], &[2]], |x| {
            x[0].feed_forward_in_out((&x[1], &x[2]), (&x[3], Some(&x[4])))
        });
        c.check(&[&[2, 3, 2], &[2, hidden], &[hidden], &[hidden, 5]], |x| {
            x[0].feed_forward_in_out((&x[1], &x[2]), (&x[3], None))
        });
    }
}

/// Transposed convolutions.
pub fn transposed_convolutions(c: &impl Check) {
    let plain = Conv2dOptions::default();
    let all = Conv2dOptions { stride: [2, 3], padding: [1, 2], dilation: [2, 1], groups: 1 };
    for (options, more) in [(plain, [0, 0]), (all, [0, 0]), (all, [1, 2])] {
        c.check(&[&[2, 3, 4, 3], &[3, 2, 3, 5], &[2]], |x| {
            x[0].conv_transpose2d(&x[1], Some(&x[2]), options, more)
        });
    }
    let twice = Conv2dOptions { stride: [2, 2], padding: [1, 1], ..plain };
    // Few channels to many and back, many to many, and depthwise.
    c.check(&[&[2, 16, 3, 2], &[16, 2, 4, 4]], |x| x[0].conv_transpose2d(&x[1], None, twice, [0, 0]));
    c.check(&[&[2, 2, 3, 2], &[2, 16, 3, 3]], |x| x[0].conv_transpose2d(&x[1], None, twice, [1, 1]));
    c.check(&[&[2, 16, 2, 3], &[16, 16, 3, 3]], |x| x[0].conv_transpose2d(&x[1], None, twice, [1, 0]));
    let grouped = Conv2dOptions { groups: 2, ..twice };
    c.check(&[&[2, 4, 3, 3], &[4, 3, 3, 3], &[6]], |x| {
        x[0].conv_transpose2d(&x[1], Some(&x[2]), grouped, [0, 0])
    });
}

/// Recurrent layers.
pub fn recurrent_layers(c: &impl Check) {
    for toward in [Toward::End, Toward::Beginning] {
        for n in [1, 4] {
            let (batch, width) = (3, 5);
            c.check(&[&[n, batch, 4 * width], &[4 * width, width], &[batch, width], &[batch, width]], |x| {
                let [hidden, cell] = x[0].lstm(&x[1], [&x[2], &x[3]], toward);
                Tensor::cat(&[&hidden, &cell.unsqueeze(0)], 0)
            });
            c.check(&[&[n, batch, 3 * width], &[3 * width, width], &[3 * width], &[batch, width]], |x| {
                x[0].gru(&x[1], Some(&x[2]), &x[3], toward)
            });
        }
    }
    c.check(&[&[2, 1, 12], &[12, 3], &[1, 3]], |x| x[0].lstm(&x[1], [&x[2], &x[2]], Toward::End)[1].clone());
    c.check(&[&[2, 70, 96], &[96, 32], &[70, 32]], |x| x[0].gru(&x[1], None, &x[2], Toward::End));
}

/// Convolutions, grouped, strided and dilated.
pub fn convolutions(c: &impl Check) {
    let plain = Conv2dOptions::default();
    for options in [
        plain,
        Conv2dOptions { padding: [1, 2], ..plain },
        Conv2dOptions { stride: [2, 1], ..plain },
        Conv2dOptions { stride: [2, 3], padding: [2, 1], dilation: [2, 1], groups: 1 },
    ] {
        c.check(&[&[2, 2, 6, 7], &[3, 2, 3, 2], &[3]], |x| x[0].conv2d(&x[1], Some(&x[2]), options));
    }
    // Many channels: in pixel order. Few to many: by strips.
    let same = Conv2dOptions { padding: [1, 1], ..plain };
    c.check(&[&[4, 16, 2, 1], &[16, 16, 3, 3]], |x| x[0].conv2d(&x[1], None, same));
    c.check(&[&[2, 2, 3, 2], &[16, 2, 3, 3], &[16]], |x| x[0].conv2d(&x[1], Some(&x[2]), same).relu());
    let grouped = Conv2dOptions { padding: [1, 1], groups: 2, ..plain };
    c.check(&[&[1, 4, 4, 4], &[6, 2, 3, 3], &[6]], |x| x[0].conv2d(&x[1], Some(&x[2]), grouped));
    let depthwise = Conv2dOptions { groups: 3, ..plain };
    c.check(&[&[2, 3, 4, 5], &[3, 1, 2, 2]], |x| x[0].conv2d(&x[1], None, depthwise));
    // The sizes of the tutorials' network, made smaller, so that the kernel for few channels is under test.
    c.check(&[&[3, 1, 12, 12], &[5, 1, 5, 5], &[5]], |x| x[0].conv2d(&x[1], Some(&x[2]), plain));
    c.check(&[&[2, 3, 12, 12], &[4, 3, 5, 5], &[4]], |x| x[0].conv2d(&x[1], Some(&x[2]), plain));
}

/// Pooling, in both orders of images.
pub fn pooling(c: &impl Check) {
    let odd = PoolOptions { kernel: [3, 2], stride: [2, 1], padding: [1, 1] };
    for options in [PoolOptions::square(2), PoolOptions::square(3), odd] {
        c.check(&[&[2, 2, 6, 7]], |x| x[0].max_pool2d(options));
        c.check(&[&[2, 2, 6, 7]], |x| in_pixels(&x[0]).max_pool2d(options));
        for padding in [CountPadding::Yes, CountPadding::No] {
            c.check(&[&[2, 2, 6, 7]], |x| x[0].avg_pool2d(options, padding));
        }
    }
    c.check(&[&[2, 1, 5, 5]], |x| x[0].max_pool2d(PoolOptions::square(2)));
    for size in [[1, 1], [2, 3], [4, 1]] {
        c.check(&[&[2, 2, 6, 7]], |x| x[0].adaptive_avg_pool2d(size));
    }
}

/// Images of another size, in each order of images and along other dimensions than theirs.
pub fn interpolations(c: &impl Check) {
    use Interpolation::{Area, Cubic, Linear, Nearest};
    let [edges, corners] = [false, true];
    for how in [Nearest, Area] {
        c.check(&[&[2, 2, 3, 4]], |x| x[0].interpolate(&[7, 2], how));
    }
    for align_corners in [edges, corners] {
        c.check(&[&[2, 2, 3, 4]], |x| x[0].interpolate(&[6, 8], Linear { align_corners }));
        c.check(&[&[2, 2, 5, 3]], |x| {
            in_pixels(&x[0]).interpolate(&[3, 7], Linear { align_corners }).square()
        });
        c.check(&[&[2, 3, 4, 5]], |x| x[0].interpolate(&[1, 9], Cubic { align_corners }));
    }
    c.check(&[&[3, 20]], |x| x[0].t().interpolate(&[45], Linear { align_corners: edges }));
    c.check(&[&[2, 2, 3, 2, 4]], |x| x[0].interpolate(&[2, 5, 4], Linear { align_corners: edges }));
    // Enough of them to be shared out, among lines and among rows.
    c.check(&[&[1, 3, 8, 9]], |x| {
        x[0].interpolate(&[64, 80], Linear { align_corners: edges }).sum(&[2], Keep::No)
    });
}

/// Softmax and its logarithm, along each dimension.
pub fn softmaxes(c: &impl Check) {
    for dim in 0..3 {
        c.check(&[&[2, 3, 4]], |x| x[0].softmax(dim));
        c.check(&[&[2, 3, 4]], |x| x[0].log_softmax(dim));
    }
}

/// Losses.
pub fn losses(c: &impl Check) {
    c.check(&[&[5, 3]], |x| x[0].nll_loss(&labels(x[0].device(), 5, 3)));
    c.check(&[&[5, 3]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, 3), 0.0));
    c.check(&[&[5, 3]], |x| x[0].cross_entropy(&labels(x[0].device(), 5, 3), 0.1));
    c.check(&[&[4, 3], &[4, 3]], |x| x[0].mse_loss(&x[1]));
    c.check(&[&[4, 3]], |x| x[0].bce_with_logits(&random(&x[0], &[4, 3], 7).sigmoid()));
}

/// Rows of a table, and layer norms.
pub fn embedding_and_norm(c: &impl Check) {
    c.check(&[&[3, 4], &[4]], |x| x[0].rms_norm(&x[1], 1e-3));
    for (groups, shape) in
        [(2, &[3, 4, 2, 3][..]), (4, &[2, 4, 5]), (1, &[3, 4]), (2, &[2, 4, 0]), (3, &[2, 9, 12, 10])]
    {
        let channels = &shape[1..2];
        c.check(&[shape, channels, channels], |x| x[0].group_norm(groups, &x[1].abs(), &x[2], 1e-3));
    }
    c.check(&[&[5, 3]], |x| {
        let ids = Tensor::from_slice(x[0].device(), &[4i64, 0, 4, 2], [2, 2]);
        x[0].embedding(&ids)
    });
    // Rows 2 to 4 of a table of 7.
    c.check(&[&[3, 2]], |x| {
        let ids = Tensor::from_slice(x[0].device(), &[4i64, 0, 4, 2, 6, 5], [2, 3]);
        x[0].embedding_within(Within { dim: 0, start: 2, of: 7 }, &ids)
    });
    c.check(&[&[3, 4]], |x| x[0].layer_norm(1, None, None, 1e-5));
    c.check(&[&[3, 4], &[4]], |x| x[0].layer_norm(1, Some(&x[1]), None, 1e-5));
    c.check(&[&[2, 3, 4], &[3, 4], &[3, 4]], |x| x[0].layer_norm(2, Some(&x[1]), Some(&x[2]), 1e-5));
}

/// Batch norms, with what is fused to them.
pub fn batch_norm(c: &impl Check) {
    let plain = |x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>| {
        x.batch_norm(weight, bias, 1e-5, Then::Nothing, None, None).out
    };
    c.check(&[&[4, 3]], |x| plain(&x[0], None, None));
    c.check(&[&[2, 3, 5], &[3]], |x| plain(&x[0], Some(&x[1]), None));
    c.check(&[&[2, 3, 4, 2], &[3], &[3]], |x| plain(&x[0], Some(&x[1]), Some(&x[2])));
    c.check(&[&[2, 3, 4, 2], &[3], &[3]], |x| plain(&in_pixels(&x[0]), Some(&x[1]), Some(&x[2])));
    for arranged in [Tensor::clone, in_pixels] {
        c.check(&[&[2, 3, 4, 2], &[3], &[3]], |x| {
            arranged(&x[0]).batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::Relu, None, None).out
        });
        c.check(&[&[2, 3, 2, 2], &[3], &[3], &[2, 3, 2, 2]], |x| {
            arranged(&x[0]).batch_norm(Some(&x[1]), Some(&x[2]), 1e-5, Then::AddRelu(&x[3]), None, None).out
        });
    }
    c.check(&[&[2, 3, 4, 2], &[3], &[3]], |x| {
        let stats = ChannelStats { mean: random(&x[0], &[3], 8), variance: random(&x[0], &[3], 9).square() };
        let plain = x[0].batch_norm_with(&stats, Some(&x[1]), Some(&x[2]), 1e-5, Then::Nothing);
        plain + in_pixels(&x[0]).batch_norm_with(&stats, Some(&x[1]), None, 1e-5, Then::Relu)
    });
}

/// Dropout of elements and of channels.
pub fn dropouts(c: &impl Check) {
    let key = DropoutKey::new(1, 2, 3, [10, 11, 12].into());
    c.check(&[&[3, 4, 5]], |x| x[0].dropout(0.5, &key));
    c.check(&[&[3, 4, 2, 2]], |x| x[0].dropout2d(0.25, &key));
}

/// Attention, in one operation and in several.
pub fn attention(c: &impl Check) {
    let key = DropoutKey::new(1, 2, 3, [10, 11].into());
    for (shape, heads) in [([2, 1, 6], 1), ([2, 5, 12], 2), ([2, 3, 9], 3), ([1, 7, 18], 1)] {
        c.check(&[&shape], |x| x[0].causal_attention(heads, None));
        c.check(&[&shape], |x| x[0].causal_attention_in_steps(heads, None));
    }
    c.check(&[&[2, 5, 12]], |x| x[0].causal_attention(2, Some((0.4, &key))));
    // The second sample's first query sees nothing.
    let mask = |device: &Device| {
        let keys = Tensor::from_slice(device, &[1.0f32, 0.0, 1.0, 1.0, 0.0], [1, 1, 1, 5]);
        keys * Tensor::from_slice(device, &[1.0f32, 1.0, 1.0, 0.0, 1.0, 1.0], [2, 1, 3, 1])
    };
    for numbers in [4, 2] {
        let parts: [&[usize]; 3] = [&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, numbers]];
        c.check(&parts, |x| x[0].attention(&x[1], &x[2], None, None));
        c.check(&parts, |x| x[0].attention(&x[1], &x[2], Some(&mask(x[0].device())), Some((0.4, &key))));
    }
    c.check(&[&[2, 3, 2, 8], &[2, 5, 2, 8]], |x| {
        // Queries by positions; keys are values too.
        let [q, k] = [0, 1].map(|i| x[i].transpose(1, 2));
        q.attention(&k, &k, Some(&mask(q.device())), None)
    });
    c.check(&[&[2, 5, 12]], |x| x[0].self_attention(2, None, Some((0.4, &key))));
    c.check(&[&[2, 5, 12]], |x| x[0].self_attention(2, Some(&mask(x[0].device()).narrow(2, 0, 1)), None));
    c.check(&[&[2, 5, 12]], |x| {
        x[0].self_attention_in_steps(2, Some(&mask(x[0].device()).narrow(2, 0, 1)), None)
    });
    c.check(&[&[2, 12, 5]], |x| x[0].transpose(1, 2).causal_attention(1, None));
}

/// Attention over more positions, and with larger heads, than kernels take at a time.
pub fn attention_of_many_positions(c: &impl Check) {
    let key = DropoutKey::new(1, 2, 3, [10, 11].into());
    // Samples, positions, numbers of a head.
    attention_of(
        c,
        &key,
        &[
            ([2, 70, 16], 2),
            ([1, 130, 64], 1),
            ([2, 33, 72], 2),
            ([1, 40, 250], 1),
            ([1, 200, 128], 1),
            ([2, 97, 104], 2),
        ],
    );
}

/// Attention over many tiles of positions, and over more heads than a GPU has blocks at a time, each of which does several then: too much
/// for a device that is only played.
pub fn attention_of_many_blocks(c: &impl Check) {
    let key = DropoutKey::new(1, 2, 3, (0..256).collect());
    attention_of(c, &key, &[([1, 1024, 64], 1), ([256, 65, 16], 8)]);
}

/// At samples, positions and numbers of a head, and so many heads; with dropout too, where `key` is of as many samples.
fn attention_of(c: &impl Check, key: &DropoutKey, sizes: &[([usize; 3], usize)]) {
    for &([batch, time, depth], heads) in sizes {
        let shape = [batch, time, 3 * heads * depth];
        c.check(&[&shape], |x| x[0].causal_attention(heads, None));
        c.check(&[&shape], |x| {
            // Every fifth position is hidden, and the last ones are.
            let seen = |i: usize| if i % 5 == 3 || i % time > time - time / 4 { 0.0f32 } else { 1.0 };
            let seen: Vec<f32> = (0..batch * time).map(seen).collect();
            let seen = Tensor::from_slice(x[0].device(), &seen, [batch, 1, 1, time]);
            x[0].self_attention(heads, None, None) + x[0].self_attention(heads, Some(&seen), None)
        });
        if batch == key.samples.len() {
            c.check(&[&shape], |x| x[0].causal_attention(heads, Some((0.2, key))));
        }
    }
}

/// Values that are used more than once.
pub fn a_value_used_twice_gets_both_gradients(c: &impl Check) {
    c.check(&[&[3]], |x| x[0].square() * &x[0] + &x[0]);
    c.check(&[&[3, 3]], |x| x[0].matmul(&x[0]).matmul(&x[0]));
}
