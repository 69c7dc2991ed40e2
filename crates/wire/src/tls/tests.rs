//! Sessions, and one who stands in between.

use super::*;
use crate::pair::{pair, soon};
use crate::{Generation, HandshakeError, Hello, Rank, Secret, Side, handshake};

fn hello(rank: u32) -> Hello {
    Hello { purpose: "comm".into(), rank: Rank(rank), generation: Generation(7) }
}

type Proof = std::result::Result<Hello, HandshakeError>;

/// Both ends of a way that is `relay`ed, with a session and a proof each.
fn prove(relay: impl FnOnce(TcpStream, TcpStream)) -> (Proof, Proof) {
    let ((dialer, near), (far, accepter)) = (pair(), pair());
    let secret = &Secret::from_bytes([7; 32]);
    std::thread::scope(|scope| {
        let dialer = scope.spawn(move || {
            let mut session = Tls::new().unwrap().dial(dialer, &soon()).unwrap();
            handshake(&mut session, secret, Side::Dialed, &hello(1), &soon())
        });
        let accepter = scope.spawn(move || {
            let mut session = Tls::new().unwrap().accept(accepter, &soon()).unwrap();
            handshake(&mut session, secret, Side::Accepted, &hello(0), &soon())
        });
        relay(near, far);
        (dialer.join().unwrap(), accepter.join().unwrap())
    })
}

/// Carries what one side sends to the other until it ends; gives what that was.
fn carry(from: &mut impl Read, to: &mut impl Write, until: usize) -> Vec<u8> {
    let mut all = Vec::new();
    let mut some = [0; 512];
    while all.len() < until {
        match from.read(&mut some) {
            Ok(0) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            came => {
                let came = &some[..came.unwrap()];
                to.write_all(came).unwrap();
                all.extend_from_slice(came);
            }
        }
    }
    all
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn two_ends_prove_themselves_whoever_carries_their_bytes() {
    let (dialer, accepter) = prove(|near, far| {
        std::thread::scope(|scope| {
            let there = scope.spawn(|| {
                let seen = carry(&mut &near, &mut &far, usize::MAX);
                let _ = far.shutdown(std::net::Shutdown::Write);
                seen
            });
            carry(&mut &far, &mut &near, usize::MAX);
            let _ = near.shutdown(std::net::Shutdown::Write);
            assert!(!contains(&there.join().unwrap(), b"phalanx1"), "it is encrypted");
        });
    });
    assert_eq!((dialer.unwrap(), accepter.unwrap()), (hello(0), hello(1)));
}

#[test]
fn one_who_ends_both_sessions_in_between_is_refused() {
    let (dialer, accepter) = prove(|near, far| {
        let (mut near, mut far) = std::thread::scope(|scope| {
            let near = scope.spawn(|| Tls::new().unwrap().accept(near, &soon()).unwrap());
            let far = Tls::new().unwrap().dial(far, &soon()).unwrap();
            (near.join().unwrap(), far)
        });
        assert_ne!(near.binding().unwrap(), far.binding().unwrap());
        // Both openings, which it can read, and the dialer's proof.
        let opening = 8 + 32 + 1 + "comm".len() + 12;
        assert!(contains(&carry(&mut near, &mut far, opening), b"phalanx1"));
        carry(&mut far, &mut near, opening);
        assert_eq!(carry(&mut near, &mut far, 32).len(), 32);
        // The accepter hangs up, and so the relay does.
        assert_eq!(carry(&mut far, &mut near, 32).len(), 0);
    });
    assert!(matches!(accepter, Err(HandshakeError::WrongSecret)), "{accepter:?}");
    assert!(matches!(dialer, Err(HandshakeError::WrongSecret)), "{dialer:?}");
}

#[test]
fn both_ends_have_the_same_binding_and_no_other_session_has_it() {
    let tls = Tls::new().unwrap();
    let meet = || {
        let (dialed, accepted) = pair();
        std::thread::scope(|scope| {
            let dialer = scope.spawn(|| tls.dial(dialed, &soon()).unwrap());
            (
                tls.accept(accepted, &soon()).unwrap().binding().unwrap(),
                dialer.join().unwrap().binding().unwrap(),
            )
        })
    };
    let ((a, b), (c, d)) = (meet(), meet());
    assert!(a == b && c == d && a != c && a.len() == 32);
}

#[test]
fn what_is_no_tls_is_named_so_and_one_who_says_nothing_is_given_up() {
    let tls = Tls::new().unwrap();
    let rows: [(&[u8], &str); 2] =
        [(b"phalanx1 and so on", "the other end doesn't speak TLS"), (b"", "no TLS within")];
    for (says, want) in rows {
        let (mut dialed, accepted) = pair();
        dialed.write_all(says).unwrap();
        let error = tls.accept(accepted, &Deadline::after(Duration::from_millis(50))).err().unwrap();
        assert!(error.to_string().contains(want), "{error}");
    }
}
