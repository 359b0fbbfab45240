//! Tests of a connection over an in-memory pipe, with a paused clock.

use std::{
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
};

use proptest::prelude::*;
use tidegate::Clock;
use tidegate_core::{MemoryBounds, MemoryStore, RuleSet, Timestamp};
use tidegate_net::{Bounds, Shutdown};
use tokio::{io::DuplexStream, time::Instant};

use super::*;
use crate::listener::resp::{bounds::OUTPUT_BYTES, transcript};

/// One command of each kind. Also one error of each kind, except for errors that close the
/// connection.
const PIPELINE: &[u8] = b"*1\r\n$4\r\nPING\r\n\
    *5\r\n$11\r\nCL.THROTTLE\r\n$3\r\nk\r\n\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n\
    *6\r\n$8\r\nthrottle\r\n$1\r\nk\r\n$1\r\n3\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n2\r\n\
    \r\n*0\r\n*-1\r\nPING \"in \\x41 line\"\n\
    *4\r\n$14\r\nTIDEGATE.CHECK\r\n$4\r\npeek\r\n$2\r\nip\r\n$9\r\n127.0.0.1\r\n\
    *2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n*1\r\n$4\r\nINFO\r\n\
    *5\r\n$8\r\nTHROTTLE\r\n$1\r\nk\r\n$1\r\nx\r\n$1\r\n1\r\n$1\r\n1\r\n\
    *3\r\n$4\r\nNOPE\r\n$0\r\n\r\n$1\r\n1\r\n*2\r\n$4\r\nECHO\r\n$2\r\n\xff\0\r\n\
    *2\r\n$6\r\nCLIENT\r\n$2\r\nID\r\n*2\r\n$7\r\nCOMMAND\r\n$5\r\nCOUNT\r\n";

fn limiter() -> Arc<ServerLimiter> {
    let store = MemoryStore::new(MemoryBounds::default());
    let clock = Clock::manual(Timestamp::from_micros(1_000_000_000));
    Arc::new(ServerLimiter::new(RuleSet::default(), store, clock))
}

fn connection(bounds: Bounds) -> Connection {
    let peer = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    Connection {
        peer,
        worker: 0,
        bounds,
        activity: Default::default(),
        handover: Default::default(),
        shutdown: Shutdown::default(),
    }
}

/// Returns a future that serves a connection, and the client's end of the connection.
fn open(pipe_bytes: usize, connection: Connection) -> (impl Future<Output = ()>, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(pipe_bytes);
    let session = RespSession::new(1, connection.peer);
    (serve(session, ours, connection, limiter()), theirs)
}

/// Sends `pieces` one by one, and returns the replies. Each piece is sent after the server has read
/// the previous piece.
fn answers(pieces: &[&[u8]], pipe_bytes: usize) -> Vec<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let (served, theirs) = open(pipe_bytes, connection(Bounds::default()));
        let (mut reader, mut writer) = tokio::io::split(theirs);
        let sent = async {
            for piece in pieces {
                // After a protocol error the server stops reading. The replies before the error are
                // still returned.
                if writer.write_all(piece).await.is_err() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            let _ = writer.shutdown().await;
        };
        let mut answers = Vec::new();
        let (_, _, read) = tokio::join!(served, sent, reader.read_to_end(&mut answers));
        read.unwrap();
        answers
    })
}

fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

#[test]
fn a_pipeline_has_the_same_replies_wherever_it_is_split() {
    let whole = transcript(&limiter(), PIPELINE);
    assert!(
        whole.starts_with(b"+PONG\r\n*5\r\n:0\r\n:16\r\n:15\r\n:-1\r\n:2\r\n"),
        "{}",
        text(&whole)
    );
    assert!(whole.ends_with(b":1\r\n:26\r\n"), "{}", text(&whole));
    for cut in 0..=PIPELINE.len() {
        let (before, after) = PIPELINE.split_at(cut);
        assert_eq!(
            text(&answers(&[before, after], 1 << 16)),
            text(&whole),
            "cut at byte {cut}"
        );
    }
}

#[test]
fn a_pipeline_has_the_same_replies_byte_by_byte_and_with_small_writes() {
    let whole = transcript(&limiter(), PIPELINE);
    let bytes: Vec<&[u8]> = PIPELINE.chunks(1).collect();
    assert_eq!(text(&answers(&bytes, 1 << 16)), text(&whole));
    for pipe_bytes in 1..20 {
        assert_eq!(
            text(&answers(&[PIPELINE], pipe_bytes)),
            text(&whole),
            "{pipe_bytes} bytes at once"
        );
    }
}

/// Encodes a command in the form that clients send.
fn array(words: &[&str]) -> String {
    let bulk = |word: &&str| format!("${}\r\n{word}\r\n", word.len());
    format!(
        "*{}\r\n{}",
        words.len(),
        words.iter().map(bulk).collect::<String>()
    )
}

#[test]
fn connection_commands_work_within_a_pipeline() {
    let (ping, throttle) = (array(&["PING"]), array(&["THROTTLE", "k", "2", "1", "60"]));
    let allowed =
        |remaining: u8, reset: u8| format!("*5\r\n:1\r\n:2\r\n:{remaining}\r\n:{reset}\r\n:0\r\n");
    let (first, second) = (allowed(1, 60), allowed(0, 120));
    for (input, expected) in [
        (
            [&ping, &array(&["QUIT"]), &ping]
                .map(String::as_str)
                .concat(),
            "+PONG\r\n+OK\r\n".to_owned(),
        ),
        (
            [&throttle, "*1\r\n:1\r\n", &throttle].concat(),
            format!("{first}-ERR Protocol error: expected '$', got ':'\r\n"),
        ),
        (
            [
                &*array(&["MULTI"]),
                &throttle,
                &throttle,
                &array(&["EXEC"]),
                &ping,
            ]
            .concat(),
            format!("+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n{first}{second}+PONG\r\n"),
        ),
        (
            [&*throttle, "PING\r\n", "throttle k 2 1 60\r\n", &ping].concat(),
            format!("{first}+PONG\r\n{second}+PONG\r\n"),
        ),
    ] {
        let input = input.as_bytes();
        assert_eq!(
            text(&transcript(&limiter(), input)),
            text(expected.as_bytes())
        );
        let bytes: Vec<&[u8]> = input.chunks(1).collect();
        assert_eq!(
            text(&answers(&bytes, 1 << 16)),
            text(expected.as_bytes()),
            "byte by byte"
        );
    }
}

#[test]
fn a_batch_ends_with_the_reply_that_reaches_the_size_limit() {
    let limiter = limiter();
    for command in ["COMMAND DOCS\r\n".to_owned(), array(&["COMMAND", "DOCS"])] {
        let one = transcript(&limiter, command.as_bytes()).len();
        let input = command.repeat(100);
        let mut session = RespSession::new(1, SocketAddr::from((Ipv4Addr::LOCALHOST, 1)));
        let (mut executor, mut read, mut written) = (CommandExecutor::default(), 0, 0);
        loop {
            let progress = executor.answer(&limiter, &mut session, &input.as_bytes()[read..]);
            assert!(
                executor.output.len() < OUTPUT_BYTES + one,
                "{} bytes at once",
                executor.output.len()
            );
            read += progress.used;
            written += executor.output.len();
            if !progress.more {
                break;
            }
        }
        assert_eq!((read, written), (input.len(), 100 * one));
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_client_is_disconnected_after_the_timeout() {
    let start = Instant::now();
    let bounds = Bounds {
        idle: Duration::from_secs(60),
        ..Bounds::default()
    };
    let (served, mut theirs) = open(1 << 16, connection(bounds));
    let client = async {
        let mut answer = [0; 7];
        for quiet in [0, 50] {
            tokio::time::sleep(Duration::from_secs(quiet)).await;
            theirs.write_all(b"PING\r\n").await.unwrap();
            theirs.read_exact(&mut answer).await.unwrap();
        }
        assert_eq!(
            theirs.read(&mut answer).await.unwrap(),
            0,
            "closed without a reply"
        );
    };
    tokio::join!(served, client);
    assert_eq!(start.elapsed().as_secs(), 110);
}

#[tokio::test(start_paused = true)]
async fn a_slow_command_times_out() {
    let start = Instant::now();
    let bounds = Bounds {
        request: Duration::from_secs(10),
        ..Bounds::default()
    };
    let (served, mut theirs) = open(1 << 16, connection(bounds));
    let client = async {
        theirs
            .write_all(b"PING\r\n*2\r\n$4\r\nECHO\r\n$60\r\n")
            .await
            .unwrap();
        while theirs.write_all(b".").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::join!(served, client);
    assert_eq!(start.elapsed().as_secs(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_is_no_longer_read_and_times_out() {
    let start = Instant::now();
    let bounds = Bounds {
        write: Duration::from_secs(10),
        ..Bounds::default()
    };
    let (served, mut theirs) = open(1_024, connection(bounds));
    let mut sent = 0;
    let client = async {
        while theirs.write_all(b"PING\r\nPING\r\n").await.is_ok() {
            sent += 12;
        }
    };
    tokio::join!(served, client);
    assert_eq!(start.elapsed().as_secs(), 10);
    assert!(
        sent <= 3 * 1_024,
        "{sent} bytes were read from a client that reads nothing"
    );
    assert_eq!(BUFFERED_BYTES.get(), 0, "its buffered bytes are released");
}

#[tokio::test]
async fn a_million_commands_in_one_pipeline_are_answered_in_bounded_memory() {
    const COMMANDS: usize = 1_000_000;
    let (served, theirs) = open(1 << 20, connection(Bounds::default()));
    let (mut reader, mut writer) = tokio::io::split(theirs);
    let send = async {
        let batch = b"*1\r\n$4\r\nPING\r\n".repeat(1_000);
        for _ in 0..COMMANDS / 1_000 {
            writer.write_all(&batch).await.unwrap();
        }
        writer.shutdown().await.unwrap();
    };
    let receive = async {
        let (mut read, mut most, mut buffer) = (0, 0, vec![0; 50_000]);
        loop {
            most = most.max(BUFFERED_BYTES.get());
            match reader.read(&mut buffer).await.unwrap() {
                0 => return (read, most),
                bytes => read += bytes,
            }
        }
    };
    let ((), (), (read, most)) = tokio::join!(served, send, receive);
    assert_eq!(read, COMMANDS * b"+PONG\r\n".len());
    assert!(
        most <= 2 * (OUTPUT_BYTES + READ_BYTES),
        "{most} bytes were buffered"
    );
}

/// A client that sends commands without a pause until `left` is 0. The client reads all replies.
struct Flood {
    /// The number of bytes that the server has not yet read.
    left: Rc<Cell<usize>>,
    received: Rc<Cell<usize>>,
}

/// The number of bytes that one read returns, which is about the size of a TLS record.
const PIECE_BYTES: usize = 16_380;

impl AsyncRead for Flood {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.left.get() == 0 {
            return Poll::Pending;
        }
        buffer.put_slice(&b"PING\r\n".repeat(PIECE_BYTES / 6));
        self.left.set(self.left.get() - PIECE_BYTES);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Flood {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.received.set(self.received.get() + bytes.len());
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl MaybeMovable for Flood {}

impl PeerClosed for Flood {
    fn poll_peer_closed(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Pending
    }
}

#[tokio::test]
async fn a_flood_of_commands_leaves_the_worker_to_other_connections() {
    const PIECES: usize = 100;
    let (left, received) = (Rc::new(Cell::new(PIECES * PIECE_BYTES)), Rc::default());
    let flood = Flood {
        left: Rc::clone(&left),
        received: Rc::clone(&received),
    };
    let connection = connection(Bounds::default());
    let session = RespSession::new(1, connection.peer);
    let mut served = std::pin::pin!(serve(session, flood, connection, limiter()));
    while left.get() > 0 {
        let before = left.get();
        std::future::poll_fn(|cx| {
            assert!(served.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        let read = before - left.get();
        assert!((1..2 * READ_BYTES).contains(&read), "{read} bytes at once");
    }
    let commands = PIECES * PIECE_BYTES / b"PING\r\n".len();
    assert_eq!(received.get(), commands * b"+PONG\r\n".len());
}

#[tokio::test]
async fn large_replies_do_not_accumulate() {
    let (served, theirs) = open(1 << 20, connection(Bounds::default()));
    let (mut reader, mut writer) = tokio::io::split(theirs);
    let send = async {
        writer
            .write_all(&b"COMMAND DOCS\n".repeat(2_000))
            .await
            .unwrap();
        writer.shutdown().await.unwrap();
    };
    let receive = async {
        let (mut read, mut most, mut buffer) = (0, 0, vec![0; 1_000]);
        loop {
            most = most.max(BUFFERED_BYTES.get());
            match reader.read(&mut buffer).await.unwrap() {
                0 => return (read, most),
                bytes => read += bytes,
            }
        }
    };
    let ((), (), (read, most)) = tokio::join!(served, send, receive);
    let one = transcript(&limiter(), b"COMMAND DOCS\n").len();
    assert_eq!(read, 2_000 * one);
    assert!(
        most <= 2 * (OUTPUT_BYTES + one + READ_BYTES),
        "{most} bytes were buffered"
    );
}

#[tokio::test(start_paused = true)]
async fn the_buffer_for_slow_clients_is_limited_per_worker() {
    // Sets the worker's total as if other connections held all of the permitted memory.
    BUFFERED_BYTES.set(MAX_HELD_BYTES);
    let start = Instant::now();
    let (served, mut theirs) = open(1 << 20, connection(Bounds::default()));
    let client = async {
        theirs.write_all(b"PING\r\n").await.unwrap();
        let mut answer = [0; 7];
        theirs.read_exact(&mut answer).await.unwrap();
        // With a short incomplete command, the connection stays open. If the command needs much
        // memory, the connection is closed.
        theirs
            .write_all(b"*2\r\n$4\r\nECHO\r\n$65536\r\n")
            .await
            .unwrap();
        theirs.write_all(&[b'.'; 60_000]).await.unwrap();
        assert_eq!(theirs.read(&mut answer).await.unwrap(), 0);
    };
    tokio::join!(served, client);
    assert_eq!(
        start.elapsed(),
        Duration::ZERO,
        "closed at once, not for being slow"
    );
    assert_eq!(
        BUFFERED_BYTES.replace(0),
        MAX_HELD_BYTES,
        "its buffered bytes are released"
    );
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_closes_idle_connections_and_lets_others_finish() {
    let start = Instant::now();
    let idle = connection(Bounds::default());
    let (served, mut theirs) = open(1 << 16, idle.clone());
    let client = async {
        theirs.write_all(b"PING\r\n").await.unwrap();
        let mut answer = [0; 7];
        theirs.read_exact(&mut answer).await.unwrap();
        idle.shutdown.begin();
        assert_eq!(theirs.read(&mut answer).await.unwrap(), 0);
    };
    tokio::join!(served, client);
    assert_eq!(
        start.elapsed(),
        Duration::ZERO,
        "closed at once, not for being idle"
    );

    let busy = connection(Bounds::default());
    let (served, mut theirs) = open(1 << 16, busy.clone());
    let client = async {
        theirs
            .write_all(b"*2\r\n$4\r\nECHO\r\n$3\r\nyes")
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        busy.shutdown.begin();
        tokio::time::sleep(Duration::from_secs(1)).await;
        theirs.write_all(b"\r\n").await.unwrap();
        let mut answer = Vec::new();
        theirs.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"$3\r\nyes\r\n");
    };
    tokio::join!(served, client);
}

fn a_command() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![
        Just(b"CL.THROTTLE".to_vec()),
        Just(b"throttle".to_vec()),
        Just(b"TIDEGATE.CHECK".to_vec()),
        Just(b"HELLO".to_vec()),
        Just(b"CLIENT".to_vec()),
        Just(b"REPLY".to_vec()),
        Just(b"SKIP".to_vec()),
        Just(b"COMMAND".to_vec()),
        Just(b"PING".to_vec()),
        Just(b"INFO".to_vec()),
        Just(b"RESET".to_vec()),
        Just(b"3".to_vec()),
        Just(b"9223372036854775807".to_vec()),
        any::<i64>().prop_map(|number| number.to_string().into_bytes()),
        prop::collection::vec(any::<u8>(), 0..20),
    ];
    prop::collection::vec(word, 0..7).prop_map(|words| {
        let mut command = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            command.extend(format!("${}\r\n", word.len()).bytes());
            command.extend(word);
            command.extend(b"\r\n");
        }
        command
    })
}

/// Commands, some of them with corrupted bytes.
fn an_input() -> impl Strategy<Value = Vec<u8>> {
    let damage = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3);
    (prop::collection::vec(a_command(), 0..8), damage).prop_map(|(commands, damage)| {
        let mut input = commands.concat();
        for (index, byte) in damage {
            if !input.is_empty() {
                let at = index.index(input.len());
                input[at] = byte;
            }
        }
        input
    })
}

proptest! {
    #[test]
    fn no_bytes_panic(input in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = transcript(&limiter(), &input);
    }

    #[test]
    fn splitting_the_input_never_changes_the_replies(
        input in an_input(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        pipe_bytes in 1_usize..200,
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(input.len() + 1)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut rest = input.as_slice();
        for cut in cuts {
            let (piece, after) = rest.split_at(cut - (input.len() - rest.len()));
            pieces.push(piece);
            rest = after;
        }
        pieces.push(rest);
        let whole = transcript(&limiter(), &input);
        prop_assert_eq!(text(&answers(&pieces, pipe_bytes)), text(&whole));
    }
}
