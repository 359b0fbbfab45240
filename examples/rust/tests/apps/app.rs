//! An application process that runs until its test ends.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
};

use crate::support::{RedisServer, TIMEOUT, eventually};

pub(crate) struct App {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl App {
    /// Starts `program`. If `redis` is given, the program shares its counters through this Redis.
    pub(crate) fn start(program: &str, redis: Option<&str>) -> Self {
        let mut process = Command::new(program)
            .arg("127.0.0.1:0")
            .args(redis)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap();
        Self {
            address: address.parse().unwrap(),
            process,
        }
    }

    /// Sends an HTTP/1.1 request and returns the raw response.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str) -> String {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n");
        write!(stream, "{head}{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    pub(crate) fn log_in(&self, password: &str) -> u16 {
        let length = password.len();
        let body = format!("content-length: {length}\r\n\r\n{password}");
        self.status("POST", "/login", &body)
    }

    pub(crate) fn status(&self, method: &str, path: &str, headers: &str) -> u16 {
        let answer = self.ask(method, path, headers);
        answer.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits until each of `apps` counts its requests in `redis`, and then clears the counters.
///
/// An application that is not yet connected enforces its share of the limits. This behaviour is
/// correct, but the tests need shared counters.
pub(crate) fn until_shared(redis: &RedisServer, apps: &[App], mut ask: impl FnMut(&App)) {
    for app in apps {
        redis.ask(&["FLUSHALL"]);
        eventually("the application counts in Redis", || {
            ask(app);
            (redis.ask(&["DBSIZE"]) != ":0").then_some(())
        });
    }
    redis.ask(&["FLUSHALL"]);
}
