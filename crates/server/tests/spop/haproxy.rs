//! A SPOP listener with a manual clock, and a client that speaks like HAProxy.

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use tidegate::Clock;
use tidegate_config::Config;
use tidegate_core::{MemoryBounds, MemoryStore, Timestamp};
use tidegate_limiter::ServerLimiter;
use tidegate_net::{Bounds, Listener, Server};
use tidegate_server::listener::spop::{self, SpopContext};

/// A timeout that is longer than any test step takes. The timeout makes a hanging test fail.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) const HELLO: u8 = 1;
pub(crate) const DISCONNECT: u8 = 2;
pub(crate) const NOTIFY: u8 = 3;
pub(crate) const AGENT_HELLO: u8 = 101;
pub(crate) const AGENT_DISCONNECT: u8 = 102;
pub(crate) const ACK: u8 = 103;

/// A server with one worker, whose only listener speaks SPOP.
pub(crate) struct TestListener {
    pub(crate) limiter: Arc<ServerLimiter>,
    listener: Listener,
    pub(crate) server: Server,
}

impl TestListener {
    pub(crate) fn open(rules: &str) -> Self {
        Self::with(rules, Bounds::default())
    }

    pub(crate) fn with(rules: &str, bounds: Bounds) -> Self {
        let config = Config::parse(rules).unwrap();
        let clock = Clock::manual(Timestamp::from_micros(1_700_000_040_000_000));
        let store = MemoryStore::new(MemoryBounds::default());
        let limiter = Arc::new(ServerLimiter::new(config.rules, store, clock));
        let server = Server::start(1).unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let context = SpopContext {
            limiter: Arc::clone(&limiter),
            headers: config.headers,
            tls: None,
        };
        let listener = spop::listen(&server, socket, bounds, context).unwrap();
        Self {
            limiter,
            listener,
            server,
        }
    }

    pub(crate) fn connect(&self) -> Client {
        let stream = TcpStream::connect(self.listener.local_addr()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream }
    }

    /// Connects and completes the handshake.
    pub(crate) fn connect_and_handshake(&self) -> Client {
        let mut client = self.connect();
        client.send(&hello(16_380));
        assert_eq!(client.frame().unwrap().kind, AGENT_HELLO);
        client
    }
}

/// A frame sent by the agent, which is the listener.
#[derive(Debug)]
pub(crate) struct AgentFrame {
    pub(crate) kind: u8,
    pub(crate) ids: (u64, u64),
    payload: Vec<u8>,
    length: usize,
}

impl AgentFrame {
    /// Returns the length of the frame, without its length prefix.
    pub(crate) fn bytes(&self) -> usize {
        self.length
    }

    /// Decodes the payload as a list of names and values, and returns the values as strings.
    pub(crate) fn items(&self) -> BTreeMap<String, String> {
        let (mut items, mut rest) = (BTreeMap::new(), &self.payload[..]);
        while !rest.is_empty() {
            let name = text(&mut rest);
            items.insert(name, value(&mut rest));
        }
        items
    }

    /// Returns the variables that an ACK sets.
    pub(crate) fn variables(&self) -> BTreeMap<String, String> {
        let actions = self.actions().into_iter();
        actions
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }

    /// Returns the variables that an ACK sets or unsets. The value of a variable is `None` if the
    /// ACK unsets the variable.
    pub(crate) fn actions(&self) -> BTreeMap<String, Option<String>> {
        assert_eq!(self.kind, ACK);
        let (mut variables, mut rest) = (BTreeMap::new(), &self.payload[..]);
        while let Some((head, after)) = rest.split_first_chunk::<3>() {
            rest = after;
            let name = text(&mut rest);
            // Each action sets or unsets a variable in the scope of the transaction.
            let value = match head {
                [1, 3, 2] => Some(value(&mut rest)),
                [2, 2, 2] => None,
                _ => panic!("an action {head:?}"),
            };
            assert_eq!(variables.insert(name, value), None, "each variable once");
        }
        variables
    }
}

pub(crate) struct Client {
    stream: TcpStream,
}

impl Client {
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends `bytes` repeatedly until the connection fails, and returns the kind of error.
    pub(crate) fn send_until_closed(&mut self, bytes: &[u8]) -> ErrorKind {
        loop {
            if let Err(error) = self.stream.write_all(bytes) {
                return error.kind();
            }
        }
    }

    /// Returns a second handle to the connection.
    pub(crate) fn handle(&self) -> Self {
        let stream = self.stream.try_clone().unwrap();
        Self { stream }
    }

    /// Reads a frame; `None` if the agent has closed the connection.
    pub(crate) fn frame(&mut self) -> Option<AgentFrame> {
        let mut length = [0; 4];
        match self.stream.read(&mut length[..1]) {
            Ok(1) => {}
            _ => return None,
        }
        self.stream.read_exact(&mut length[1..]).unwrap();
        let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap()];
        self.stream.read_exact(&mut frame).unwrap();
        let mut rest = &frame[5..];
        assert_eq!(&frame[1..5], &[0, 0, 0, 1], "a frame in one piece");
        let ids = (number(&mut rest), number(&mut rest));
        Some(AgentFrame {
            kind: frame[0],
            ids,
            payload: rest.to_vec(),
            length: frame.len(),
        })
    }

    pub(crate) fn notify(&mut self, arguments: &[(&str, Argument<'_>)]) -> AgentFrame {
        self.send(&notify((7, 1), arguments));
        self.frame().unwrap()
    }

    /// Asserts that the agent sends an AGENT-DISCONNECT frame with this status and closes the
    /// connection. Returns the message in the frame.
    pub(crate) fn expect_disconnect(&mut self, status: u32) -> String {
        let frame = self.frame().expect("an AGENT-DISCONNECT");
        assert_eq!((frame.kind, frame.ids), (AGENT_DISCONNECT, (0, 0)));
        let items = frame.items();
        assert_eq!(items["status-code"], status.to_string(), "{items:?}");
        assert!(self.frame().is_none(), "the connection is closed");
        items["message"].clone()
    }

    pub(crate) fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }
}

/// A typed value, such as an argument of a message, as HAProxy encodes it.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Ip([u8; 4]),
    Text(&'a [u8]),
}

pub(crate) fn frame(kind: u8, flags: u32, ids: (u64, u64), payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind];
    frame.extend(flags.to_be_bytes());
    frame.extend(encoded(ids.0));
    frame.extend(encoded(ids.1));
    frame.extend(payload);
    let mut bytes = u32::try_from(frame.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(frame);
    bytes
}

/// Encodes a list of names and values, such as the payload of a HAPROXY-HELLO frame or the
/// arguments of a message.
pub(crate) fn items(items: &[(&str, Argument<'_>)]) -> Vec<u8> {
    items
        .iter()
        .fold(Vec::new(), |mut bytes, (name, argument)| {
            bytes.extend(encoded(name.len().try_into().unwrap()));
            bytes.extend(name.as_bytes());
            match argument {
                Argument::Null => bytes.push(0),
                Argument::Bool(is_true) => bytes.push(if *is_true { 0x11 } else { 1 }),
                Argument::Int(number) => {
                    bytes.push(4);
                    bytes.extend(encoded(number.cast_unsigned()));
                }
                Argument::Ip(octets) => {
                    bytes.push(6);
                    bytes.extend(octets);
                }
                Argument::Text(text) => {
                    bytes.push(8);
                    bytes.extend(encoded(text.len().try_into().unwrap()));
                    bytes.extend(*text);
                }
            }
            bytes
        })
}

/// Returns the HAPROXY-HELLO frame that HAProxy 2.6 sends, with this maximum frame length.
pub(crate) fn hello(max_frame_bytes: u32) -> Vec<u8> {
    let mut payload = items(&[("supported-versions", Argument::Text(b"2.0"))]);
    payload.extend(max_frame_size(max_frame_bytes));
    payload.extend(items(&[
        ("capabilities", Argument::Text(b"pipelining,async")),
        ("engine-id", Argument::Text(b"c4d3a6d0-3b76-4e13-8c8e")),
    ]));
    frame(HELLO, 1, (0, 0), &payload)
}

/// Encodes the item `max-frame-size`. The type of the item, an unsigned 32-bit integer, is not used
/// for arguments.
pub(crate) fn max_frame_size(bytes: u32) -> Vec<u8> {
    let mut item = b"\x0emax-frame-size\x03".to_vec();
    item.extend(encoded(bytes.into()));
    item
}

/// Returns a NOTIFY frame with one message.
pub(crate) fn notify(ids: (u64, u64), arguments: &[(&str, Argument<'_>)]) -> Vec<u8> {
    let mut payload = b"\x05check".to_vec();
    payload.push(arguments.len().try_into().unwrap());
    payload.extend(items(arguments));
    frame(NOTIFY, 1, ids, &payload)
}

/// Encodes a number as a variable-length integer, as described in the SPOP specification.
fn encoded(number: u64) -> Vec<u8> {
    if number < 240 {
        return vec![number.try_into().unwrap()];
    }
    let mut bytes = vec![u8::try_from(number & 15).unwrap() | 240];
    let mut rest = (number - 240) >> 4;
    while rest >= 128 {
        bytes.push(u8::try_from(rest & 127).unwrap() | 128);
        rest = (rest - 128) >> 7;
    }
    bytes.push(rest.try_into().unwrap());
    bytes
}

fn byte(rest: &mut &[u8]) -> u8 {
    let (byte, after) = rest.split_first().unwrap();
    *rest = after;
    *byte
}

fn number(rest: &mut &[u8]) -> u64 {
    let mut number = u64::from(byte(rest));
    let mut shift = 4;
    let mut more = number >= 240;
    while more {
        let next = u64::from(byte(rest));
        number += next << shift;
        shift += 7;
        more = next >= 128;
    }
    number
}

fn text(rest: &mut &[u8]) -> String {
    let length = usize::try_from(number(rest)).unwrap();
    let (text, after) = rest.split_at(length);
    *rest = after;
    String::from_utf8(text.to_vec()).unwrap()
}

fn value(rest: &mut &[u8]) -> String {
    match byte(rest) {
        1 => "false".to_owned(),
        0x11 => "true".to_owned(),
        3 | 5 => number(rest).to_string(),
        8 => text(rest),
        kind => panic!("a value of type {kind}"),
    }
}
