//! What a thread looks at between two operations, so that whoever waits for a pass to end may end it before.

use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    /// Ambient state, as whether operations record is: neither a model nor a walk back has to know.
    static LOOK: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// Runs `f`, and `look` with each operation of it that is recorded, or that is gone back through. `look` ends `f` where it
/// panics: what was recorded is forgotten then, and gradients are left half made.
///
/// ```
/// use phalanx_tensor::{DType, Device, Keep, Tensor, looking};
/// use std::{cell::Cell, rc::Rc};
///
/// let looks = Rc::new(Cell::new(0));
/// let seen = Rc::clone(&looks);
/// let look = Rc::new(move || seen.set(seen.get() + 1));
/// looking(look, || {
///     let x = Tensor::ones(&Device::cpu(1), [3], DType::F32).requires_grad();
///     x.relu().sum(&[0], Keep::Yes).backward()
/// });
/// // Of two operations, there and back.
/// assert_eq!(looks.get(), 4);
/// ```
pub fn looking<R>(look: Rc<dyn Fn()>, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Rc<dyn Fn()>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LOOK.set(self.0.take());
        }
    }
    let _restore = Restore(LOOK.replace(Some(look)));
    f()
}

/// There is another operation.
pub(crate) fn look() {
    if let Some(look) = LOOK.with_borrow(Clone::clone) {
        look();
    }
}
