//! Whether somebody who hung up at a proof is dialed again.

use crate::{Deadline, HandshakeError};
use std::time::Duration;

/// How often, and after how long at first; each pause is twice as long as the one before.
const TIMES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(50);

/// Whoever has no room for strangers, or ends at that moment, hangs up on a proof as one does that knows another secret. So only one that
/// does it again and again is taken for that.
#[derive(Debug, Default)]
pub struct Doubts {
    had: u32,
}

impl Doubts {
    /// Whether this error may be no more than that, and the other end is to be dialed again, now that a pause is over. Never once the
    /// deadline would be.
    pub fn remain(&mut self, error: &HandshakeError, deadline: &Deadline) -> bool {
        let pause = PAUSE * (1 << self.had.min(TIMES));
        let remain =
            matches!(error, HandshakeError::WrongSecret) && self.had < TIMES && deadline.remaining() > pause;
        if remain {
            self.had += 1;
            std::thread::sleep(pause);
        }
        remain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_is_another_four_times_is_another() {
        let (wrong, deadline) = (HandshakeError::WrongSecret, Deadline::after(Duration::from_secs(60)));
        let mut doubts = Doubts::default();
        let times = (0..9).filter(|_| doubts.remain(&wrong, &deadline)).count();
        assert_eq!(times, TIMES as usize);
        assert!(deadline.waited() >= PAUSE * 15);
        assert!(!Doubts::default().remain(&HandshakeError::NotOurs, &deadline));
        assert!(!Doubts::default().remain(&wrong, &Deadline::after(PAUSE / 2)));
    }
}
