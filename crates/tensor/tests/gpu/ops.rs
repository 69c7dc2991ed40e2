//! Every op forward and backward, over the shapes that the CPU's gradients are checked at.

use crate::cases;
use crate::rig::rig;

/// One row a family of operations.
macro_rules! families {
    ($($family:ident;)*) => {$(
        #[test]
        fn $family() {
            let Some(rig) = rig(1) else { return };
            cases::$family(&rig);
        }
    )*};
}

families! {
    arithmetic_broadcasts;
    functions;
    reductions;
    views;
    products;
    convolutions;
    pooling;
    batch_norm;
    dropouts;
    embedding_and_norm;
    a_value_used_twice_gets_both_gradients;
    softmaxes;
    losses;
}
