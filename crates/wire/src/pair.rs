//! Two ends of a connection, for tests.

use crate::deadline::Deadline;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// When a test gives up.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

/// The end that dialed and the one that was dialed.
pub(crate) fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialed, listener.accept().unwrap().0)
}
