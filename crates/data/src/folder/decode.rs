//! From the bytes of a JPEG or PNG file to three planes, or the reason why not.
//!
//! Grey becomes colour and transparency is dropped, as Pillow's `convert("RGB")` does. Refused are: what is cut off, CMYK, and more
//! than 8 bits a channel, of which each reader makes something else. The words of the libraries that decode come last, in brackets.

use crate::images::COLOURS;
use png::{BitDepth, ColorType, Limits, Transformations};
use std::io::Cursor;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// No side is longer.
const MAX_SIDE: usize = 1 << 14;
/// No image has more pixels: a file of some bytes may claim any number.
const MAX_PIXELS: usize = 1 << 27;

/// Writes the planes of an image over `planes`; gives its height and width.
pub(super) fn decode(file: &[u8], planes: &mut Vec<u8>) -> Result<[usize; 2], String> {
    match file {
        [0xff, 0xd8, ..] => jpeg(file, planes),
        [0x89, b'P', b'N', b'G', ..] => png(file, planes),
        [] => Err("the file is empty".into()),
        other => {
            let start: Vec<String> = other.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
            Err(format!("neither a JPEG nor a PNG file, so convert it: it begins with {}", start.join(" ")))
        }
    }
}

fn jpeg(file: &[u8], planes: &mut Vec<u8>) -> Result<[usize; 2], String> {
    let Frame { bits, height, width, colours } = frame(file)?;
    match (bits, colours) {
        (8, 1 | 3) => {}
        (8, 4) => return Err("a JPEG of CMYK colours: convert it to RGB".into()),
        (8, other) => return Err(format!("a JPEG of {other} colours: convert it to RGB")),
        (other, _) => return Err(format!("a JPEG of {other} bits a channel: convert it to 8")),
    }
    check_size(height, width)?;
    // The decoder makes grey of what is missing.
    if !file.ends_with(&[0xff, 0xd9]) && !has_end(file) {
        return Err("the JPEG is cut off: it has no end".into());
    }
    let options = DecoderOptions::default()
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let decoded = JpegDecoder::new_with_options(ZCursor::new(file), options).decode();
    let pixels = decoded.map_err(|error| format!("broken JPEG: its data can't be decoded ({error})"))?;
    if pixels.len() != COLOURS * height * width {
        return Err(format!("broken JPEG: {} bytes of {height}x{width} pixels", pixels.len()));
    }
    separate(&pixels, COLOURS, planes);
    Ok([height, width])
}

/// Whether a JPEG's image has an end, behind which anything may lie: phones put films there.
fn has_end(file: &[u8]) -> bool {
    let mut rest = &file[2..];
    while let Some((marker, behind)) = next_marker(rest) {
        rest = match marker {
            0xd9 => return true,
            0x01 | 0xd0..=0xd8 => behind,
            // A segment, of which the image's data may follow one: no marker but those above lies within it.
            _ => {
                let length = behind.first_chunk::<2>().map(|length| usize::from(u16::from_be_bytes(*length)));
                match length.and_then(|length| behind.get(length..)) {
                    Some(behind) => behind,
                    None => return false,
                }
            }
        };
    }
    false
}

/// The next marker and what lies behind it. As decoders do, passes over fill bytes and over what belongs to no segment.
fn next_marker(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let start = bytes.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff))?;
    Some((bytes[start + 1], &bytes[start + 2..]))
}

/// What a JPEG says of its image.
struct Frame {
    bits: u8,
    height: usize,
    width: usize,
    colours: u8,
}

/// The frame header, one of the segments before the image's data: what the decoder says of a bad one means nothing to whoever
/// has the file.
fn frame(file: &[u8]) -> Result<Frame, String> {
    let cut = || "the JPEG is cut off: it ends before the image begins".to_owned();
    let mut rest = &file[2..];
    loop {
        let marker;
        (marker, rest) = next_marker(rest).ok_or_else(cut)?;
        match marker {
            // These stand alone.
            0x01 | 0xd0..=0xd8 => continue,
            0xd9 | 0xda => return Err("broken JPEG: it has no header that tells its size".into()),
            _ => {}
        }
        let length = rest.first_chunk::<2>().ok_or_else(cut)?;
        let length = usize::from(u16::from_be_bytes(*length)).max(2);
        let segment = rest.get(2..length).ok_or_else(cut)?;
        // Of this row three markers are tables, and one is to be defined yet.
        if matches!(marker, 0xc0..=0xcf) && !matches!(marker, 0xc4 | 0xc8 | 0xcc) {
            let &[bits, h1, h0, w1, w0, colours, ..] = segment else {
                return Err("broken JPEG: the header that tells its size is too short".into());
            };
            let side = |high, low| usize::from(u16::from_be_bytes([high, low]));
            if marker > 0xc2 {
                let kind = marker - 0xc0;
                return Err(format!(
                    "a JPEG of a rare kind (SOF{kind}): save it as a baseline or progressive one"
                ));
            }
            return Ok(Frame { bits, height: side(h1, h0), width: side(w1, w0), colours });
        }
        rest = &rest[length..];
    }
}

fn png(file: &[u8], planes: &mut Vec<u8>) -> Result<[usize; 2], String> {
    let broken = |error: png::DecodingError| match error {
        png::DecodingError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            "the PNG is cut off".to_owned()
        }
        error => format!("broken PNG: it can't be decoded ({error})"),
    };
    let limits = Limits { bytes: 4 * COLOURS * MAX_PIXELS };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), limits);
    decoder.set_transformations(Transformations::EXPAND);
    let info = decoder.read_header_info().map_err(broken)?;
    let (height, width) = (info.height as usize, info.width as usize);
    if info.bit_depth == BitDepth::Sixteen {
        return Err("a PNG of 16 bits a channel: convert it to 8".into());
    }
    check_size(height, width)?;
    let mut reader = decoder.read_info().map_err(broken)?;
    let mut pixels = vec![0; reader.output_buffer_size().ok_or("broken PNG: it has no size")?];
    reader.next_frame(&mut pixels).map_err(broken)?;
    let channels = match reader.output_color_type().0 {
        ColorType::Grayscale => 1,
        ColorType::GrayscaleAlpha => 2,
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        ColorType::Indexed => return Err("broken PNG: colours without a palette".into()),
    };
    separate(&pixels[..height * width * channels], channels, planes);
    Ok([height, width])
}

fn check_size(height: usize, width: usize) -> Result<(), String> {
    if height.min(width) == 0 {
        return Err(format!("an image without pixels: its size is {height}x{width}"));
    }
    let fits = height.max(width) <= MAX_SIDE && height * width <= MAX_PIXELS;
    let refuse = || {
        format!("an image of {height}x{width} pixels: at most {MAX_SIDE} on a side and {MAX_PIXELS} are read")
    };
    fits.then_some(()).ok_or_else(refuse)
}

/// Takes pixels apart: the colours are the first three of three or four channels, and else the first thrice.
fn separate(pixels: &[u8], channels: usize, planes: &mut Vec<u8>) {
    planes.resize(pixels.len() / channels * COLOURS, 0);
    for (colour, plane) in planes.chunks_exact_mut(pixels.len() / channels).enumerate() {
        let channel = if channels < COLOURS { 0 } else { colour };
        plane.iter_mut().zip(pixels.chunks_exact(channels)).for_each(|(out, pixel)| *out = pixel[channel]);
    }
}
