//! A program that runs during a test.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use super::repository;

/// The timeout for all waits. On an idle machine, each wait takes only milliseconds.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A program and its standard error. The program is stopped when the test ends.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}; run scripts/setup"));
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .take_while(|line| send.send(line.clone()).is_ok())
                .for_each(drop);
        });
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// Waits for the next line that contains all of `words`, and returns it. Panics if the program
    /// ends first or writes nothing for [`TIMEOUT`].
    pub(crate) fn wait_for(&mut self, words: &[&str]) -> String {
        while let Ok(line) = self.lines.recv_timeout(TIMEOUT) {
            self.seen.push(line.clone());
            if words.iter().all(|word| line.contains(word)) {
                return line;
            }
        }
        panic!("never logged {words:?}, but:\n{}", self.seen.join("\n"))
    }

    /// Returns whether any line that has been read so far contains all of `words`.
    pub(crate) fn has_logged(&self, words: &[&str]) -> bool {
        let has_them = |line: &String| words.iter().all(|word| line.contains(word));
        self.seen.iter().any(has_them)
    }

    /// Returns the program's peak resident memory, in bytes.
    pub(crate) fn peak_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.unwrap().trim().trim_end_matches(" kB");
        kilobytes.parse::<u64>().unwrap() * 1_024
    }

    /// Returns the program's soft limit on the number of open files.
    pub(crate) fn soft_file_limit(&self) -> u64 {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.child.id())).unwrap();
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max open files"));
        let soft = line.unwrap().split_whitespace().next();
        soft.unwrap().parse().unwrap()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Limits the program's number of open files to `most`.
    pub(crate) fn limit_files(&self, most: u32) {
        let (pid, limit) = (self.child.id().to_string(), format!("--nofile={most}:"));
        let output = run(Command::new(tool("prlimit")).args(["--pid", &pid, &limit]));
        assert!(output.status.success(), "{output:?}");
    }

    /// Returns the log lines that have been read so far.
    pub(crate) fn log_text(&self) -> String {
        self.seen.join("\n")
    }

    /// Returns whether the program has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until the program has ended. Returns the exit status and the rest of the log.
    pub(crate) fn wait(&mut self) -> (ExitStatus, Vec<String>) {
        // Wait until standard error is closed, which happens when the program ends. Unlike
        // `Child::wait`, this function has a timeout.
        let mut rest = Vec::new();
        loop {
            match self.lines.recv_timeout(TIMEOUT) {
                Ok(line) => rest.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                    panic!("did not end, but logged:\n{}", rest.join("\n"))
                }
            }
        }
        (self.child.wait().unwrap(), rest)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // Send SIGTERM first, so that programs can stop their worker processes.
        signal(self.child.id(), "TERM");
        while self.lines.recv_timeout(Duration::from_secs(5)).is_ok() {}
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(pid: u32, name: &str) {
    let kill = format!("kill -{name} {pid}");
    let _ = Command::new("sh")
        .args(["-c", &kill])
        .stderr(Stdio::null())
        .status();
}

/// Runs a command until it ends.
pub(crate) fn run(command: &mut Command) -> Output {
    command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}; run scripts/setup"))
}

/// Runs `script` of this repository with the built binary, and checks that it passes.
pub(crate) fn assert_script_passes(script: &str, options: &[&str]) {
    let mut command = Command::new("python3");
    command
        .args(["-B", script, "--binary", env!("CARGO_BIN_EXE_tidegate")])
        .args(options)
        .current_dir(repository());
    let output = run(&mut command);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && printed.ends_with("\npassed\n"),
        "{printed}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns the path of a program in Debian's standard directories.
pub(crate) fn tool(name: &str) -> PathBuf {
    [
        "/usr/local/sbin",
        "/usr/local/bin",
        "/usr/sbin",
        "/usr/bin",
        "/sbin",
        "/bin",
    ]
    .iter()
    .map(|dir| Path::new(dir).join(name))
    .find(|path| path.exists())
    .unwrap_or_else(|| panic!("{name} is not installed; run scripts/setup"))
}
