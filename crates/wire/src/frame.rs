//! Frames: a length of four bytes, little-endian, then that many bytes.

use std::io::{Error, ErrorKind, Read, Result, Write};

/// Writes one frame.
pub fn write_frame(out: &mut impl Write, payload: &[u8]) -> Result<()> {
    let len = u32::try_from(payload.len())
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "a frame above 4 GiB"))?;
    let mut bytes = Vec::with_capacity(4 + payload.len());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(payload);
    out.write_all(&bytes)?;
    out.flush()
}

/// Reads one frame of at most `limit` bytes. A longer one is an error before any of it is read.
pub fn read_frame(from: &mut impl Read, limit: usize) -> Result<Vec<u8>> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > limit {
        let text = format!("a frame of {len} bytes where at most {limit} are taken");
        return Err(Error::new(ErrorKind::InvalidData, text));
    }
    let mut payload = vec![0; len];
    from.read_exact(&mut payload)?;
    Ok(payload)
}

/// Why no frame came, for people.
pub fn why_no_frame(error: &Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "it gives no sign of life".into(),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => "it closed the connection".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_whole_or_an_error() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, b"hello").unwrap();
        assert_eq!(read_frame(&mut &bytes[..], 5).unwrap(), b"hello");
        assert_eq!(read_frame(&mut &bytes[..], 4).unwrap_err().kind(), ErrorKind::InvalidData);
        for len in 0..bytes.len() {
            assert!(read_frame(&mut &bytes[..len], 5).is_err(), "cut to {len}");
        }
    }
}
