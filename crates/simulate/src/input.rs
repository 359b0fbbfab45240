//! Opens and decompresses log files, and reads lines of bounded length.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    time::Duration,
};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use tidegate_core::bounds;

/// The maximum length of a line in bytes. A longer line counts as damaged, and is not kept in
/// memory.
pub const MAX_LINE_BYTES: usize = bounds::MAX_LOG_LINE_BYTES;

/// The size of the read buffers.
const BUFFER_BYTES: usize = 256 << 10;

/// The interval at which a read of standard input checks whether the simulation was interrupted.
const POLL: Duration = Duration::from_millis(100);

/// The maximum number of standard input blocks that are read ahead.
const BLOCKS_AHEAD: usize = 4;

/// A handle for monitoring and interrupting a simulation from other threads.
#[derive(Debug, Default)]
pub struct SimulationHandle {
    is_interrupted: AtomicBool,
    bytes_read: AtomicU64,
}

impl SimulationHandle {
    /// Ends the simulation. The report contains the results so far.
    pub fn interrupt(&self) {
        self.is_interrupted.store(true, Ordering::Relaxed);
    }

    /// Returns true if the simulation was interrupted.
    #[must_use]
    pub fn is_interrupted(&self) -> bool {
        self.is_interrupted.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes read from all files. For compressed files, this number is the
    /// number of compressed bytes.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }
}

/// The source of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogSource {
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
}

impl LogSource {
    /// Returns the source with this name; `-` means standard input.
    #[must_use]
    pub fn named(name: &Path) -> Self {
        if name == Path::new("-") {
            Self::Stdin
        } else {
            Self::File(name.to_owned())
        }
    }

    /// Returns the name to use in messages.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Stdin => "standard input".to_owned(),
        }
    }

    /// Returns the size of the file in bytes; `None` if the size is unknown. For a compressed file,
    /// the size is the compressed size.
    #[must_use]
    pub fn size(&self) -> Option<u64> {
        match self {
            Self::File(path) => {
                let data = path.metadata().ok().filter(std::fs::Metadata::is_file);
                data.map(|data| data.len())
            }
            Self::Stdin => None,
        }
    }

    fn open(&self, handle: &Arc<SimulationHandle>) -> io::Result<Box<dyn Read + Send>> {
        match self {
            Self::File(path) => {
                let file = File::open(path)?;
                if file.metadata()?.is_dir() {
                    return Err(io::ErrorKind::IsADirectory.into());
                }
                Ok(Box::new(file))
            }
            Self::Stdin => Ok(Box::new(InterruptibleStdin::start(Arc::clone(handle))?)),
        }
    }
}

/// The reason why a log cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The operating system returned an error.
    #[error("{0}")]
    Unreadable(io::Error),
    /// The log contains NUL bytes.
    #[error(
        "is not a text file: it contains NUL bytes; give an access log (a log in UTF-16 must be converted to UTF-8 first)"
    )]
    Binary,
    /// The file is compressed in an unsupported format.
    #[error(
        "is compressed with {program}; decompress it: {program} -dc FILE | tidegate simulate RULES --log -"
    )]
    Compressed {
        /// The program that decompresses the file.
        program: &'static str,
    },
}

/// The result of reading a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineStatus {
    /// The line is in the buffer.
    Whole,
    /// The line is longer than [`MAX_LINE_BYTES`] and was skipped.
    TooLong,
    /// There are no more lines.
    End,
}

/// An open log.
pub(crate) struct LogReader {
    lines: Box<dyn BufRead + Send>,
}

impl LogReader {
    /// Opens a log, and decompresses it if it is compressed.
    pub(crate) fn open(
        source: &LogSource,
        handle: &Arc<SimulationHandle>,
    ) -> Result<Self, InputError> {
        let raw = source.open(handle).map_err(InputError::Unreadable)?;
        Self::new(raw, handle)
    }

    fn new(raw: Box<dyn Read + Send>, handle: &Arc<SimulationHandle>) -> Result<Self, InputError> {
        let counting = CountingReader {
            inner: raw,
            handle: Arc::clone(handle),
        };
        let mut stored = BufReader::with_capacity(BUFFER_BYTES, counting);
        let start = fill(&mut stored).map_err(InputError::Unreadable)?;
        let mut lines: Box<dyn BufRead + Send> = match start {
            [0x1f, 0x8b, ..] => buffered(MultiGzDecoder::new(stored)),
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                buffered(ZstdFrames::Between(stored))
            }
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => {
                return Err(InputError::Compressed { program: "bzip2" });
            }
            [0xfd, b'7', b'z', b'X', b'Z', ..] => {
                return Err(InputError::Compressed { program: "xz" });
            }
            [0x04, 0x22, 0x4d, 0x18, ..] => {
                return Err(InputError::Compressed { program: "lz4" });
            }
            _ => Box::new(stored),
        };
        if is_binary(fill(&mut lines).map_err(InputError::Unreadable)?) {
            return Err(InputError::Binary);
        }
        Ok(Self { lines })
    }

    /// Reads the next line into `line`, without its line terminator.
    pub(crate) fn next_line(&mut self, line: &mut Vec<u8>) -> io::Result<LineStatus> {
        line.clear();
        let most = MAX_LINE_BYTES as u64 + 1;
        let read = (&mut self.lines).take(most).read_until(b'\n', line)?;
        if read == 0 {
            return Ok(LineStatus::End);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
            if line.last() == Some(&b'\r') {
                line.pop();
            }
        } else if line.len() > MAX_LINE_BYTES {
            line.truncate(MAX_LINE_BYTES);
            self.lines.skip_until(b'\n')?;
            return Ok(LineStatus::TooLong);
        }
        Ok(LineStatus::Whole)
    }
}

/// Returns whether the beginning of a file is binary. A file with only a few NUL bytes is not
/// binary. Lines with NUL bytes in a text file are treated as damaged. NUL bytes at the start are
/// ignored, because they remain if a log is truncated in place while a program writes to it.
fn is_binary(start: &[u8]) -> bool {
    let text = start.iter().position(|byte| *byte != 0);
    let rest = text.map_or(&[][..], |at| &start[at..]);
    let zeros = rest.iter().filter(|byte| **byte == 0).count();
    zeros * 10 > rest.len()
}

fn buffered(reader: impl Read + Send + 'static) -> Box<dyn BufRead + Send> {
    Box::new(BufReader::with_capacity(BUFFER_BYTES, reader))
}

fn fill<R: BufRead>(reader: &mut R) -> io::Result<&[u8]> {
    loop {
        match reader.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    reader.fill_buf()
}

/// A reader that counts the bytes read.
struct CountingReader {
    inner: Box<dyn Read + Send>,
    handle: Arc<SimulationHandle>,
}

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        // The length of a buffer in memory fits in 64 bits.
        self.handle
            .bytes_read
            .fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// The consecutive frames of a Zstandard file.
enum ZstdFrames<R: BufRead> {
    Between(R),
    In(Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>),
    Ended,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match std::mem::replace(self, Self::Ended) {
                Self::Between(mut stored) => {
                    if fill(&mut stored)?.is_empty() {
                        return Ok(0);
                    }
                    if skip_frame(&mut stored)? {
                        *self = Self::Between(stored);
                        continue;
                    }
                    let frame = StreamingDecoder::new(stored).map_err(|error| {
                        io::Error::new(io::ErrorKind::InvalidData, error.to_string())
                    })?;
                    *self = Self::In(Box::new(frame));
                }
                Self::In(mut frame) => match frame.read(buffer)? {
                    0 if !buffer.is_empty() => *self = Self::Between(frame.into_inner()),
                    read => {
                        *self = Self::In(frame);
                        return Ok(read);
                    }
                },
                Self::Ended => return Ok(0),
            }
        }
    }
}

/// Skips a skippable frame (RFC 8878, section 3.1.2), which contains no log data. Returns whether
/// there was a skippable frame. Programs that compress on several cores write skippable frames.
fn skip_frame(stored: &mut impl BufRead) -> io::Result<bool> {
    let [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] = fill(stored)? else {
        return Ok(false);
    };
    let mut head = [0; 8];
    stored.read_exact(&mut head)?;
    let [_, _, _, _, length @ ..] = head;
    let length = u64::from(u32::from_le_bytes(length));
    let skipped = io::copy(&mut stored.take(length), &mut io::sink())?;
    if skipped < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(true)
}

/// Standard input, which is read by another thread, so that the simulation can be interrupted while
/// no input arrives.
struct InterruptibleStdin {
    blocks: Receiver<io::Result<Vec<u8>>>,
    block: io::Cursor<Vec<u8>>,
    handle: Arc<SimulationHandle>,
}

impl InterruptibleStdin {
    fn start(handle: Arc<SimulationHandle>) -> io::Result<Self> {
        let (send, blocks) = sync_channel(BLOCKS_AHEAD);
        std::thread::Builder::new()
            .name("stdin".to_owned())
            .spawn(move || {
                let mut stdin = io::stdin().lock();
                loop {
                    let mut block = vec![0; BUFFER_BYTES];
                    let read = match stdin.read(&mut block) {
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Ok(0) => return,
                        read => read,
                    };
                    let is_error = read.is_err();
                    let block = read.map(|read| {
                        block.truncate(read);
                        block
                    });
                    if send.send(block).is_err() || is_error {
                        return;
                    }
                }
            })?;
        Ok(Self {
            blocks,
            block: io::Cursor::default(),
            handle,
        })
    }
}

impl Read for InterruptibleStdin {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.block.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            match self.blocks.recv_timeout(POLL) {
                Ok(block) => self.block = io::Cursor::new(block?),
                Err(RecvTimeoutError::Timeout) if !self.handle.is_interrupted() => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn lines(bytes: Vec<u8>) -> Vec<String> {
        let mut reader = LogReader::new(Box::new(io::Cursor::new(bytes)), &Arc::default()).unwrap();
        let mut line = Vec::new();
        let mut lines = Vec::new();
        loop {
            match reader.next_line(&mut line).unwrap() {
                LineStatus::Whole => lines.push(String::from_utf8(line.clone()).unwrap()),
                LineStatus::TooLong => lines.push("too long".to_owned()),
                LineStatus::End => return lines,
            }
        }
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        ruzstd::encoding::compress_to_vec(text.as_bytes(), level)
    }

    #[test]
    fn lines_end_at_a_newline_or_at_the_end() {
        assert_eq!(lines(b"a\r\n\nb".to_vec()), ["a", "", "b"]);
        assert_eq!(lines(Vec::new()), Vec::<String>::new());
    }

    #[test]
    fn compressed_files_with_several_parts_are_read() {
        for compress in [gzip, zstd] {
            let mut bytes = compress("a\nb");
            bytes.extend(compress("c\nd\n"));
            assert_eq!(lines(bytes), ["a", "bc", "d"]);
        }
    }

    #[test]
    fn frames_without_text_are_skipped() {
        let skippable = [&[0x53, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"xyz"].concat();
        let bytes = [
            &skippable[..],
            &zstd("a\nb"),
            &skippable,
            &zstd("c\n"),
            &skippable,
        ];
        assert_eq!(lines(bytes.concat()), ["a", "bc"]);
    }

    #[test]
    fn a_few_nul_bytes_do_not_make_a_file_binary() {
        let lines_of_log = "203.0.113.9 - - a line of a log\n".repeat(20);
        let mut bytes = vec![0; 300];
        bytes.extend(lines_of_log.as_bytes());
        bytes.extend(b"one \0 more\n");
        assert_eq!(lines(bytes).len(), 21);
    }

    #[test]
    fn a_long_line_is_skipped() {
        let mut text = "x".repeat(MAX_LINE_BYTES);
        text.push('\n');
        text.push_str(&"y".repeat(MAX_LINE_BYTES * 20));
        text.push_str("\nz\n");
        let read = lines(text.into_bytes());
        assert_eq!(read[1..], ["too long", "z"]);
        assert_eq!(read[0].len(), MAX_LINE_BYTES);
    }

    #[test]
    fn other_files_are_refused() {
        let refused = |bytes: &[u8]| {
            let raw = Box::new(io::Cursor::new(bytes.to_vec()));
            let error = LogReader::new(raw, &Arc::default()).err().unwrap();
            error.to_string()
        };
        assert!(refused(b"\x7fELF\0\0").contains("NUL bytes"));
        assert!(refused(&gzip("a\0b")).contains("NUL bytes"));
        assert!(refused(b"BZh91AY").contains("bzip2 -dc"));
        assert!(refused(b"\xfd7zXZ\0").contains("xz -dc"));
    }

    #[test]
    fn a_damaged_file_is_an_error() {
        for compress in [gzip, zstd] {
            let mut bytes = compress(&"some text\n".repeat(10_000));
            bytes.truncate(bytes.len() - 10);
            let raw = Box::new(io::Cursor::new(bytes));
            // Opening the log may already fail, depending on the buffer sizes.
            let Ok(mut reader) = LogReader::new(raw, &Arc::default()) else {
                continue;
            };
            let mut line = Vec::new();
            let failed = loop {
                match reader.next_line(&mut line) {
                    Err(error) => break error,
                    Ok(LineStatus::End) => {
                        panic!("a truncated file was read to its end without an error")
                    }
                    Ok(_) => {}
                }
            };
            assert_ne!(failed.kind(), io::ErrorKind::Interrupted);
        }
    }
}
