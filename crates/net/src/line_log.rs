//! A line-based log: an append-only file or standard output, written by a separate thread.
//!
//! Callers do not wait for the disk. If lines are logged faster than the thread can write them,
//! lines are dropped and counted.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    time::Duration,
};

/// The maximum number of queued lines.
const MAX_QUEUED_LINES: usize = 16_384;
/// The maximum total size of all queued lines, in bytes.
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// The number of dropped lines after which a failed rotation is retried.
const ROTATION_RETRY_LINES: u32 = 1_000;

/// How long shutdown waits for queued lines to be written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings of a [`LineLog`].
#[derive(Clone, Debug)]
pub struct LineLogSettings {
    /// The name of the log in messages, such as `access log`.
    pub name: &'static str,
    /// The file; `None` is standard output.
    pub path: Option<PathBuf>,
    /// The size in bytes at which the file is rotated. Rotation appends `.1` to the name of the
    /// file, replaces any older file of that name, and starts a new file. With `None`, the file
    /// grows without limit.
    pub rotate_at: Option<u64>,
}

/// A handle to an open log.
#[derive(Clone)]
pub struct LineLog {
    queue: SyncSender<LogCommand>,
    shared: Arc<SharedState>,
}

enum LogCommand {
    Write(String),
    /// Wakes the writer, so that it checks [`SharedState::control`] even if no line is queued.
    Wake,
}

/// The state that the handles and the writer share, in addition to the queue.
#[derive(Default)]
struct SharedState {
    lost: AtomicU64,
    /// The total number of queued lines. A line is counted just before it is queued.
    queued_lines: AtomicU64,
    queued_bytes: AtomicUsize,
    /// Whether `control` contains a request. The writer checks the flag instead of locking
    /// `control` for each line.
    has_control: AtomicBool,
    control: Mutex<ControlRequests>,
}

/// Requests to the writer other than log lines. Control requests bypass the queue, because the
/// queue may be full.
#[derive(Default)]
struct ControlRequests {
    reopen: bool,
    finish: Vec<FinishRequest>,
}

/// A request to be notified when all previously queued lines are written.
struct FinishRequest {
    /// The number of lines that were queued before this request.
    lines: u64,
    done: SyncSender<()>,
}

impl SharedState {
    fn take_control(&self) -> ControlRequests {
        if !self.has_control.load(Ordering::SeqCst) {
            return ControlRequests::default();
        }
        self.has_control.store(false, Ordering::SeqCst);
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut control)
    }
}

impl LineLog {
    /// Opens the log for appending.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if the file cannot be opened or the thread cannot be
    /// started.
    pub fn open(settings: LineLogSettings) -> io::Result<Self> {
        let file = settings.path.as_deref().map(open).transpose()?;
        let bytes = match &file {
            Some(file) => file.metadata()?.len(),
            None => 0,
        };
        let thread = settings.name.replace(' ', "-");
        let (log, queue, mut writer) = Self::new(out(file), settings);
        writer.bytes = bytes;
        std::thread::Builder::new()
            .name(thread)
            .spawn(move || writer.run(&queue))?;
        Ok(log)
    }

    fn new(
        out: BufWriter<Box<dyn Write + Send>>,
        settings: LineLogSettings,
    ) -> (Self, Receiver<LogCommand>, LogWriter) {
        let (queue, inbox) = sync_channel(MAX_QUEUED_LINES);
        let shared = Arc::<SharedState>::default();
        let writer = LogWriter {
            out,
            settings,
            bytes: 0,
            is_failing: false,
            dropped_since_rotation: None,
            finishing: Vec::new(),
            written_lines: 0,
            shared: Arc::clone(&shared),
        };
        (Self { queue, shared }, inbox, writer)
    }

    /// Reopens the file before the next line is written, after log rotation has moved it.
    pub fn reopen(&self) {
        self.request(|control| control.reopen = true);
    }

    /// Waits until all lines queued so far are written, for at most 2 seconds.
    pub fn finish(&self) {
        let _ = self.request_finish().recv_timeout(FINISH_TIMEOUT);
    }

    fn request_finish(&self) -> Receiver<()> {
        let (done, wait) = sync_channel(1);
        let lines = self.shared.queued_lines.load(Ordering::SeqCst);
        self.request(|control| control.finish.push(FinishRequest { lines, done }));
        wait
    }

    fn request(&self, change: impl FnOnce(&mut ControlRequests)) {
        let control = &self.shared.control;
        change(&mut control.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.has_control.store(true, Ordering::SeqCst);
        // If the queue is full, no wake-up is needed: the writer is busy, and checks for requests
        // before each line.
        let _ = self.queue.try_send(LogCommand::Wake);
    }

    /// Counts a line that the caller could not log.
    pub fn count_lost(&self) {
        self.shared.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of dropped lines.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Queues `line`, which ends with a newline. Drops and counts the line if the queue is full.
    pub fn write(&self, line: String) {
        let bytes = line.len();
        let shared = &self.shared;
        let queued = shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let has_room = queued.saturating_add(bytes) <= MAX_QUEUED_BYTES;
        // Count the line before queueing it: a count that is briefly too high only delays the end
        // of `finish`.
        shared.queued_lines.fetch_add(1, Ordering::SeqCst);
        if !has_room || self.queue.try_send(LogCommand::Write(line)).is_err() {
            shared.queued_lines.fetch_sub(1, Ordering::SeqCst);
            shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for LineLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineLog").finish_non_exhaustive()
    }
}

/// The state of the writer thread.
struct LogWriter {
    out: BufWriter<Box<dyn Write + Send>>,
    settings: LineLogSettings,
    /// The size of the current file.
    bytes: u64,
    /// Whether the last write failed. The error is logged only once until a write succeeds again.
    is_failing: bool,
    /// The number of lines dropped since the last rotation failed; `None` if it succeeded.
    dropped_since_rotation: Option<u32>,
    finishing: Vec<FinishRequest>,
    /// The total number of lines taken from the queue.
    written_lines: u64,
    shared: Arc<SharedState>,
}

impl LogWriter {
    /// Writes lines until all handles are dropped, and flushes the file whenever the queue becomes
    /// empty.
    fn run(mut self, queue: &Receiver<LogCommand>) {
        while let Ok(command) = queue.recv() {
            self.execute(command);
            while let Ok(command) = queue.try_recv() {
                self.execute(command);
            }
            self.flush();
            // The queue is empty, so everything is written.
            self.notify_finished(u64::MAX);
        }
    }

    /// Wakes the callers of `finish` that wait only for the first `lines` lines or fewer.
    fn notify_finished(&mut self, lines: u64) {
        let finished = self
            .finishing
            .extract_if(.., |finish| finish.lines <= lines);
        for finish in finished {
            let _ = finish.done.try_send(());
        }
    }

    fn execute(&mut self, command: LogCommand) {
        let control = self.shared.take_control();
        if control.reopen {
            self.reopen();
        }
        self.finishing.extend(control.finish);
        if let LogCommand::Write(line) = command {
            self.shared
                .queued_bytes
                .fetch_sub(line.len(), Ordering::Relaxed);
            self.write(&line);
            self.written_lines += 1;
        }
        // Under continuous load, the queue may never become empty.
        let written = self.written_lines;
        if self.finishing.iter().any(|finish| finish.lines <= written) {
            self.flush();
            self.notify_finished(written);
        }
    }

    fn write(&mut self, line: &str) {
        let is_full = self.settings.rotate_at.is_some_and(|most| {
            // A line that exceeds the maximum file size gets its own file.
            self.bytes > 0 && self.bytes.saturating_add(line.len() as u64) > most
        });
        if is_full && !self.make_room() {
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let written = self.out.write_all(line.as_bytes());
        match &written {
            Ok(()) => self.bytes += line.len() as u64,
            Err(_) => {
                self.shared.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.report(&written);
    }

    /// Rotates the full file. If the rotation fails, returns false and drops the line, so that the
    /// file does not grow beyond its maximum. The rotation is retried after
    /// [`ROTATION_RETRY_LINES`] lines.
    fn make_room(&mut self) -> bool {
        if let Some(dropped) = &mut self.dropped_since_rotation
            && *dropped < ROTATION_RETRY_LINES
        {
            *dropped += 1;
            return false;
        }
        match self.rotate() {
            Ok(()) => {
                self.dropped_since_rotation = None;
                true
            }
            Err(error) => {
                if self.dropped_since_rotation.is_none() {
                    let name = self.settings.name;
                    tracing::error!(
                        "cannot rotate the {name}, and drops lines until the rotation succeeds: {error}; fix the permissions of its folder"
                    );
                }
                self.dropped_since_rotation = Some(1);
                false
            }
        }
    }

    /// Renames the full file, and starts a new one.
    fn rotate(&mut self) -> io::Result<()> {
        let Some(path) = &self.settings.path else {
            return Ok(());
        };
        let mut moved = path.clone().into_os_string();
        moved.push(".1");
        match fs::rename(path, moved) {
            // An earlier attempt may have renamed the file but failed to open a new one.
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.open_next(),
        }
    }

    fn reopen(&mut self) {
        let Some(path) = self.settings.path.clone() else {
            return;
        };
        if let Err(error) = self.open_next() {
            tracing::error!(
                file = %path.display(),
                "failed to reopen {}: {error}; keeping the current file",
                self.settings.name
            );
        }
    }

    /// Opens the file at the log's path. Buffered lines are first written to the current file; if
    /// that fails, the current file stays in use.
    fn open_next(&mut self) -> io::Result<()> {
        let Some(path) = &self.settings.path else {
            return Ok(());
        };
        let file = open(path)?;
        let bytes = file.metadata()?.len();
        self.out.flush()?;
        self.out = out(Some(file));
        self.bytes = bytes;
        Ok(())
    }

    fn flush(&mut self) {
        let flushed = self.out.flush();
        self.report(&flushed);
    }

    /// Logs a failed write, unless the previous write failed, too.
    fn report(&mut self, result: &io::Result<()>) {
        if let Err(error) = result
            && !self.is_failing
        {
            let name = self.settings.name;
            tracing::error!("cannot write the {name}: {error}; free disk space, or fix the path");
        }
        self.is_failing = result.is_err();
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Only the owner and the group can read the file, because the file contains addresses and
    // paths. Group access is for the log shipper.
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o640)
        .open(path)
}

fn out(file: Option<File>) -> BufWriter<Box<dyn Write + Send>> {
    BufWriter::new(match file {
        Some(file) => Box::new(file),
        None => Box::new(io::stdout()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_that_fails_drops_lines_and_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let moved = folder.path().join("log.1");
        // The rotation fails, because a file cannot replace a non-empty folder.
        fs::create_dir_all(moved.join("occupied")).unwrap();
        let log = LineLog::open(LineLogSettings {
            name: "test log",
            path: Some(path.clone()),
            rotate_at: Some(100),
        })
        .unwrap();
        let line = || format!("{}\n", "x".repeat(59));
        for _ in 0..10 {
            log.write(line());
        }
        log.finish();
        assert_eq!(fs::read_to_string(&path).unwrap().len(), 60);
        assert_eq!(log.lost(), 9);
        fs::remove_dir_all(&moved).unwrap();
        for _ in 0..ROTATION_RETRY_LINES {
            log.write(line());
        }
        log.finish();
        assert!(log.lost() < u64::from(ROTATION_RETRY_LINES) + 9);
        assert!(fs::read_to_string(&path).unwrap().len() <= 100);
        assert!(moved.is_file());
    }

    #[test]
    fn a_full_queue_loses_lines_but_no_control_request() {
        let folder = tempfile::tempdir().unwrap();
        let [moved, path] = ["moved", "current"].map(|name| folder.path().join(name));
        let settings = LineLogSettings {
            name: "test log",
            path: Some(path.clone()),
            rotate_at: None,
        };
        let file = open(&moved).unwrap();
        let (log, queue, writer) = LineLog::new(out(Some(file)), settings);
        while log.lost() == 0 {
            log.write("line\n".to_owned());
        }
        log.reopen();
        let finished = log.request_finish();
        let writing = std::thread::spawn(move || writer.run(&queue));
        finished.recv_timeout(Duration::from_secs(60)).unwrap();
        let written = [&moved, &path].map(|path| fs::read_to_string(path).unwrap());
        assert_eq!(written[0], "");
        assert_eq!(written[1], "line\n".repeat(MAX_QUEUED_LINES));
        drop(log);
        writing.join().unwrap();
    }

    /// A file that logs another line whenever a line is written to it.
    struct EndlessLog(Arc<Mutex<Option<LineLog>>>);

    impl Write for EndlessLog {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            if let Some(log) = &*self.0.lock().unwrap() {
                log.write("more\n".to_owned());
            }
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn finish_does_not_wait_for_later_lines() {
        let settings = LineLogSettings {
            name: "test log",
            path: None,
            rotate_at: None,
        };
        let source = Arc::<Mutex<Option<LineLog>>>::default();
        let file: Box<dyn Write + Send> = Box::new(EndlessLog(Arc::clone(&source)));
        let unbuffered = BufWriter::with_capacity(0, file);
        let (log, queue, writer) = LineLog::new(unbuffered, settings);
        *source.lock().unwrap() = Some(log.clone());
        log.write("line\n".to_owned());
        let finished = log.request_finish();
        let writing = std::thread::spawn(move || writer.run(&queue));
        let finished = finished.recv_timeout(Duration::from_secs(60));
        *source.lock().unwrap() = None;
        drop(log);
        writing.join().unwrap();
        finished.unwrap();
    }

    #[test]
    fn a_full_file_is_rotated_and_the_size_of_both_files_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        fs::write(&path, "old\n").unwrap();
        let log = LineLog::open(LineLogSettings {
            name: "test log",
            path: Some(path),
            rotate_at: Some(10),
        });
        let log = log.unwrap();
        for line in [
            "one\n",
            "two\n",
            "three\n",
            "a line that is longer than a file\n",
            "four\n",
        ] {
            log.write(line.to_owned());
        }
        log.request_finish()
            .recv_timeout(Duration::from_secs(60))
            .unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("lines"), "four\n");
        assert_eq!(read("lines.1"), "a line that is longer than a file\n");
        assert_eq!(log.lost(), 0);
    }
}
