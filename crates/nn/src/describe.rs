//! The short way to write a module: its parts as a table.

/// Writes a struct with its `new` and its [`Module`](crate::Module): each row is a part's name, its type and how it is made from
/// `new`'s arguments. Parameters are named after the rows, in their order. A part may also be an `Option` of a module, which
/// does nothing where it is `None`, or a `Vec` of modules, which are named by their numbers and come one after the other.
///
/// ```
/// use phalanx_nn::{Conv2d, Dropout, Linear, Module, module};
///
/// module! {
///     /// (N, 1, 28, 28) digits to (N, classes) log-probabilities.
///     pub struct Net(classes: usize, dropout: f64) {
///         conv: Conv2d = Conv2d::new(1, 8, 5),
///         drop: Dropout = Dropout::new(dropout),
///         fc: Linear = Linear::new(8 * 24 * 24, classes),
///     }
///
///     fn forward(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
///         let x = self.conv.forward(x, ctx).relu().flatten_from(1);
///         self.fc.forward(&self.drop.forward(&x, ctx), ctx).log_softmax(1)
///     }
/// }
/// # let device = phalanx_tensor::Device::cpu(1);
/// # let parameters = phalanx_nn::Parameters::build(&mut Net::new(10, 0.5), &device, 0);
/// # assert_eq!(parameters.names(), ["conv.weight", "conv.bias", "fc.weight", "fc.bias"]);
/// ```
///
/// A model that can be cut says where: `blocks` in the place of `forward` has a row a block, with the parts that belong to it and
/// what it makes of `x`. Its `forward` is all of them in order.
///
/// ```
/// use phalanx_nn::{Ctx, Linear, Module, Parameters, module};
///
/// module! {
///     struct Net() {
///         hidden: Linear = Linear::new(4, 8),
///         out: Linear = Linear::new(8, 2),
///     }
///
///     blocks(&self, x: &Tensor, ctx: &mut Ctx) -> Tensor {
///         (hidden) => self.hidden.forward(x, ctx).relu(),
///         (out) => self.out.forward(x, ctx).log_softmax(1),
///     }
/// }
/// # let net = Net::new();
/// assert_eq!((net.blocks(), net.block_of("out.bias")), (2, 1));
/// ```
///
/// What doesn't fit the table, such as a list of layers of a length that is known late, implements `Module` by hand.
#[macro_export]
macro_rules! module {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident($($arg:ident: $arg_type:ty),* $(,)?) {
            $($part:ident: $type:ty = $value:expr),* $(,)?
        }

        blocks(&$self:ident, $x:ident: &Tensor, $ctx:ident: &mut Ctx) -> Tensor {
            $(($($of:ident),*) => $block:expr),* $(,)?
        }
    ) => {
        $crate::module! {
            @parts
            $(#[$meta])*
            $vis struct $name($($arg: $arg_type),*) { $($part: $type = $value),* }
        }

        impl $crate::Module for $name {
            fn forward(&self, x: &$crate::Tensor, ctx: &mut $crate::Ctx) -> $crate::Tensor {
                (0..$crate::Module::blocks(self)).fold(x.clone(), |x, block| {
                    $crate::Module::forward_block(self, block, &x, ctx)
                })
            }

            fn visit(&mut self, v: &mut $crate::Visitor<'_>) {
                $(v.child(stringify!($part), &mut self.$part);)*
            }

            fn blocks(&self) -> usize {
                [$(stringify!($block)),*].len()
            }

            #[allow(unused_assignments)]
            fn forward_block(
                &$self,
                block: usize,
                $x: &$crate::Tensor,
                $ctx: &mut $crate::Ctx,
            ) -> $crate::Tensor {
                let mut before = 0;
                $(
                    if block == before {
                        return $block;
                    }
                    before += 1;
                )*
                panic!("forward_block: block {block} of {before}")
            }

            fn block_of(&self, name: &str) -> usize {
                let blocks: &[&[&str]] = &[$(&[$(stringify!($of)),*]),*];
                let part = name.split('.').next().unwrap_or(name);
                let found = blocks.iter().position(|parts| parts.contains(&part));
                found.unwrap_or_else(|| panic!("block_of: {name} belongs to no block of {}", stringify!($name)))
            }
        }
    };
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident($($arg:ident: $arg_type:ty),* $(,)?) {
            $($part:ident: $type:ty = $value:expr),* $(,)?
        }

        $(#[$forward_meta:meta])*
        fn forward(&$self:ident, $x:ident: &Tensor, $ctx:ident: &mut Ctx) -> Tensor $body:block
    ) => {
        $crate::module! {
            @parts
            $(#[$meta])*
            $vis struct $name($($arg: $arg_type),*) { $($part: $type = $value),* }
        }

        impl $crate::Module for $name {
            $(#[$forward_meta])*
            fn forward(&$self, $x: &$crate::Tensor, $ctx: &mut $crate::Ctx) -> $crate::Tensor $body

            fn visit(&mut self, v: &mut $crate::Visitor<'_>) {
                $(v.child(stringify!($part), &mut self.$part);)*
            }
        }
    };
    (
        @parts
        $(#[$meta:meta])*
        $vis:vis struct $name:ident($($arg:ident: $arg_type:ty),*) { $($part:ident: $type:ty = $value:expr),* }
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($part: $type),*
        }

        impl $name {
            /// The module, whose parameters get values from `Parameters::build`.
            #[allow(clippy::new_without_default)]
            $vis fn new($($arg: $arg_type),*) -> $name {
                $(let $part: $type = $value;)*
                $name { $($part),* }
            }
        }
    };
}
