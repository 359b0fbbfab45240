//! The control plane in Python with grpcio, `tests/control_plane/serve_commands.py`.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{sync::mpsc, time::timeout};

use super::{
    convert::Resource,
    plane::{End, Plane, Request, Response, Stream},
};
use crate::support::{Proxy, TIMEOUT};

/// A running control plane. Clients connect through a proxy, which can break their connections.
pub(super) struct PythonPlane {
    process: Child,
    streams: mpsc::UnboundedReceiver<PythonStream>,
    proxy: Arc<Proxy>,
    _generated: TempDir,
}

type Commands = Arc<Mutex<ChildStdin>>;

pub(super) struct PythonStream {
    number: u64,
    commands: Commands,
    events: mpsc::UnboundedReceiver<Value>,
    proxy: Arc<Proxy>,
}

impl Plane for PythonPlane {
    type Stream = PythonStream;

    async fn start() -> Self {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let python = package.join("../../target/test-python/bin/python3");
        assert!(python.exists(), "{python:?} is missing; run scripts/setup");
        let generated = tempfile::tempdir().unwrap();
        let mut process = Command::new(python)
            .arg(package.join("tests/control_plane/serve_commands.py"))
            .arg("--protos")
            .arg(package.join("proto"))
            .arg("--generated")
            .arg(generated.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = Arc::new(Mutex::new(process.stdin.take().unwrap()));
        let mut events = BufReader::new(process.stdout.take().unwrap());
        let mut first = String::new();
        events.read_line(&mut first).unwrap();
        let first: Value = serde_json::from_str(&first).expect("the control plane starts");
        let port = first["port"].as_u64().unwrap();
        let proxy = Arc::new(Proxy::before(u16::try_from(port).unwrap()));
        let (sender, streams) = mpsc::unbounded_channel();
        let plane = Self {
            process,
            streams,
            proxy: Arc::clone(&proxy),
            _generated: generated,
        };
        thread::spawn(move || distribute(events, &commands, &proxy, &sender));
        plane
    }

    async fn accept(&mut self) -> PythonStream {
        let stream = timeout(TIMEOUT, self.streams.recv()).await;
        stream.expect("the client opens a stream").unwrap()
    }

    fn port(&self) -> u16 {
        self.proxy.port()
    }
}

impl Drop for PythonPlane {
    fn drop(&mut self) {
        // An error means that the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Passes the events of each stream to its receiver until the control plane ends.
fn distribute(
    events: BufReader<ChildStdout>,
    commands: &Commands,
    proxy: &Arc<Proxy>,
    streams: &mpsc::UnboundedSender<PythonStream>,
) {
    let mut senders = HashMap::new();
    for line in events.lines().map_while(Result::ok) {
        let event: Value = serde_json::from_str(&line).unwrap();
        let number = event["stream"].as_u64().unwrap();
        let sender = senders.entry(number).or_insert_with(|| {
            let (sender, receiver) = mpsc::unbounded_channel();
            // The test may have dropped the control plane, or the stream below.
            let _ = streams.send(PythonStream {
                number,
                commands: Arc::clone(commands),
                events: receiver,
                proxy: Arc::clone(proxy),
            });
            sender
        });
        let _ = sender.send(event);
    }
}

impl PythonStream {
    fn command(&self, name: &str, value: &Value) -> std::io::Result<()> {
        let mut commands = self.commands.lock().unwrap();
        writeln!(commands, "{}", json!({"stream": self.number, name: value}))
    }
}

impl Stream for PythonStream {
    async fn request(&mut self) -> Request {
        let event = timeout(TIMEOUT, self.events.recv()).await;
        let event = event.expect("the client sends a request").unwrap();
        let fields = &event["request"];
        assert!(fields.is_object(), "expected a request, got {event}");
        let text = |name: &str| fields[name].as_str().unwrap_or_default().to_owned();
        let error = fields.get("error_detail").map(|status| {
            let code = status["code"].as_i64().unwrap();
            let message = status["message"].as_str().unwrap();
            (i32::try_from(code).unwrap(), message.to_owned())
        });
        Request {
            version: text("version_info"),
            nonce: text("response_nonce"),
            type_url: text("type_url"),
            has_node: fields["node"].is_object(),
            resource_names: fields["resource_names"].as_array().map_or(0, Vec::len),
            error,
        }
    }

    async fn respond(&mut self, response: &Response<'_>) {
        let resources: Vec<&Resource> = response.resources.iter().collect();
        let fields = json!({
            "version": response.version,
            "nonce": response.nonce,
            "type_url": response.type_url,
            "resources": resources,
        });
        self.command("respond", &fields).unwrap();
    }

    async fn end(&mut self, end: End) {
        match end {
            End::Closed => self.command("end", &Value::Null).unwrap(),
            End::Failed => self.command("end", &json!("UNAVAILABLE")).unwrap(),
            End::Broken => self.proxy.reset(),
        }
    }
}

impl Drop for PythonStream {
    fn drop(&mut self) {
        // The control plane ignores this if the stream has ended. It may have ended itself.
        let _ = self.command("end", &Value::Null);
    }
}
