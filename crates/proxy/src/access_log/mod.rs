//! The access log: one line of JSON per request, written when the request has ended.
//!
//! A separate thread writes the log, so no request waits for the disk. If requests end faster than
//! the thread can write, lines are dropped and counted. Headers and queries may contain secrets:
//! only the headers `Host` and `User-Agent` are logged, and queries only if configured.

mod entry;

use std::{
    fmt,
    fs::{File, OpenOptions},
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

pub(crate) use self::entry::{AccessLogService, LogContext, LoggedUpstream, Session};

/// The maximum number of queued lines, and the maximum size of all queued lines in bytes.
const MAX_QUEUED_LINES: usize = 16_384;
const MAX_QUEUED_BYTES: usize = 16 << 20;

/// How long shutdown waits for queued lines to be written.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// A handle to the open access log.
#[derive(Clone)]
pub struct AccessLog {
    queue: SyncSender<LogCommand>,
    shared: Arc<SharedState>,
    query: bool,
}

enum LogCommand {
    Write(String),
    /// Wakes the writer, so that it checks [`SharedState::control`] even if no line is queued.
    Wake,
}

/// The state that the handles and the writer share, besides the queue.
#[derive(Default)]
struct SharedState {
    lost: AtomicU64,
    /// The number of lines ever queued, including the lines that are being queued now.
    queued_lines: AtomicU64,
    queued_bytes: AtomicUsize,
    /// Whether `control` has a request. With this flag, the writer need not take the lock for each
    /// line.
    has_control: AtomicBool,
    control: Mutex<ControlRequests>,
}

/// Requests to the writer that are not sent through the queue, because the queue may be full.
#[derive(Default)]
struct ControlRequests {
    reopen: bool,
    finish: Vec<FinishRequest>,
}

/// A request to be notified when all lines that were queued before the request are written.
struct FinishRequest {
    /// The number of lines queued before the request.
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

impl AccessLog {
    /// Opens the log of `settings` for appending.
    ///
    /// # Errors
    ///
    /// The operating system's error if the file cannot be opened or the thread cannot be started.
    pub fn open(settings: &tidegate_config::AccessLogConfig) -> io::Result<Self> {
        let file = settings.to.as_deref().map(open).transpose()?;
        let (log, queue, writer) = Self::new(out(file), settings);
        std::thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || writer.run(&queue))?;
        Ok(log)
    }

    fn new(
        out: BufWriter<Box<dyn Write + Send>>,
        settings: &tidegate_config::AccessLogConfig,
    ) -> (Self, Receiver<LogCommand>, Writer) {
        let (queue, inbox) = sync_channel(MAX_QUEUED_LINES);
        let shared = Arc::<SharedState>::default();
        let writer = Writer {
            out,
            path: settings.to.clone(),
            finishing: Vec::new(),
            written_lines: 0,
            shared: Arc::clone(&shared),
        };
        let log = Self {
            queue,
            shared,
            query: settings.query,
        };
        (log, inbox, writer)
    }

    /// Reopens the file before the next line is written, after log rotation has moved it.
    pub fn reopen(&self) {
        self.request(|control| control.reopen = true);
    }

    /// Waits until the lines queued so far are written, for at most 2 seconds.
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
        // A full queue needs no wake, because the writer checks for requests before each line.
        let _ = self.queue.try_send(LogCommand::Wake);
    }

    /// Returns how many lines were dropped.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    fn write(&self, line: String) {
        let bytes = line.len();
        let shared = &self.shared;
        let queued = shared.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let has_room = queued.saturating_add(bytes) <= MAX_QUEUED_BYTES;
        // The line is counted before it is sent. A count that is too high only delays the end of
        // `finish`.
        shared.queued_lines.fetch_add(1, Ordering::SeqCst);
        if !has_room || self.queue.try_send(LogCommand::Write(line)).is_err() {
            shared.queued_lines.fetch_sub(1, Ordering::SeqCst);
            shared.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessLog")
            .field("query", &self.query)
            .finish_non_exhaustive()
    }
}

/// The state of the writer thread.
struct Writer {
    out: BufWriter<Box<dyn Write + Send>>,
    path: Option<PathBuf>,
    finishing: Vec<FinishRequest>,
    /// The number of lines that were ever taken from the queue.
    written_lines: u64,
    shared: Arc<SharedState>,
}

impl Writer {
    /// Writes until all handles are dropped. Flushes once per batch of queued lines.
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

    /// Wakes the tasks that wait for the first `lines` lines, which have now been written.
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
            if let Err(error) = self.out.write_all(line.as_bytes()) {
                tracing::error!("cannot write the access log: {error}");
                self.shared.lost.fetch_add(1, Ordering::Relaxed);
            }
            self.written_lines += 1;
        }
        // While clients send requests, the queue may never become empty.
        let written = self.written_lines;
        if self.finishing.iter().any(|finish| finish.lines <= written) {
            self.flush();
            self.notify_finished(written);
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match open(path) {
            Ok(file) => {
                self.flush();
                self.out = out(Some(file));
            }
            Err(error) => tracing::error!(
                file = %path.display(),
                "failed to reopen access log: {error}; keeping the current file"
            ),
        }
    }

    fn flush(&mut self) {
        if let Err(error) = self.out.flush() {
            tracing::error!("cannot write the access log: {error}");
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    // Readable by the owner and the group only, for the log shipper: addresses and paths are
    // private.
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
    fn a_full_queue_loses_lines_but_no_control_request() {
        let folder = tempfile::tempdir().unwrap();
        let [moved, path] = ["moved", "current"].map(|name| folder.path().join(name));
        let settings = tidegate_config::AccessLogConfig {
            to: Some(path.clone()),
            query: false,
        };
        let file = open(&moved).unwrap();
        let (log, queue, writer) = AccessLog::new(out(Some(file)), &settings);
        while log.lost() == 0 {
            log.write("line\n".to_owned());
        }
        log.reopen();
        let finished = log.request_finish();
        let writing = std::thread::spawn(move || writer.run(&queue));
        finished.recv_timeout(Duration::from_secs(60)).unwrap();
        let written = [&moved, &path].map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(written[0], "");
        assert_eq!(written[1], "line\n".repeat(MAX_QUEUED_LINES));
        drop(log);
        writing.join().unwrap();
    }

    /// A file that logs another line whenever a line is written to the file.
    struct EndlessLog(Arc<Mutex<Option<AccessLog>>>);

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
        let settings = tidegate_config::AccessLogConfig {
            to: None,
            query: false,
        };
        let source = Arc::<Mutex<Option<AccessLog>>>::default();
        let file: Box<dyn Write + Send> = Box::new(EndlessLog(Arc::clone(&source)));
        let unbuffered = BufWriter::with_capacity(0, file);
        let (log, queue, writer) = AccessLog::new(unbuffered, &settings);
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
}
