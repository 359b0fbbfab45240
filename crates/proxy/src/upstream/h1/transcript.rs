//! An upstream connection without a socket, for fuzzing: parses given response bytes.

use std::{
    collections::VecDeque,
    future::poll_fn,
    io,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Method, Request, Response};
use tidegate_config::Proxy;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Http1Connection, Socket};
use crate::{headers::hop_by_hop, request_body::Upload};

/// A connection to an upstream that sends scripted bytes.
#[derive(Debug)]
pub struct ScriptedConnection {
    connection: Http1Connection,
    socket: ScriptedSocket,
}

/// A response as the proxy parsed it.
#[derive(Debug, Default)]
pub struct ParsedResponse {
    /// The head as the client would receive it, if the head was valid.
    pub head: Option<Response<()>>,
    /// The received part of the body.
    pub body: Vec<u8>,
    /// The trailers, if there are any.
    pub trailers: Option<HeaderMap>,
    /// The reason why the response is incomplete; `None` if it is complete.
    pub problem: Option<String>,
}

impl ScriptedConnection {
    /// Opens a connection on which no request has been sent yet.
    #[must_use]
    pub fn open(settings: &Proxy) -> Self {
        let socket = ScriptedSocket::default();
        Self {
            connection: Http1Connection::new(socket.clone(), settings),
            socket,
        }
    }

    /// Returns whether the connection accepts another request: the last response is complete, and
    /// no other data follows it.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.connection.is_ready() && self.socket.pieces().is_empty()
    }

    /// Sends a request with `method` on a ready connection. The scripted upstream sends `pieces`,
    /// one per read, and then closes the connection.
    #[must_use]
    pub fn send(
        &mut self,
        method: Method,
        pieces: impl IntoIterator<Item = Vec<u8>>,
    ) -> ParsedResponse {
        self.socket
            .pieces()
            .extend(pieces.into_iter().map(Bytes::from));
        let mut request = Request::new(Upload::empty());
        *request.method_mut() = method;
        self.connection.start(request, None);
        let mut parsed = ParsedResponse::default();
        // The scripted socket is always ready, so reading the response never has to wait.
        let result = self.read_response(&mut parsed).now_or_never();
        let result = result.unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()));
        parsed.problem = result.err().map(|error| error.to_string());
        parsed
    }

    async fn read_response(&mut self, parsed: &mut ParsedResponse) -> io::Result<()> {
        let mut head = poll_fn(|cx| self.connection.poll_head(cx)).await?;
        hop_by_hop::strip_response(head.headers_mut());
        parsed.head = Some(head);
        while let Some(frame) = poll_fn(|cx| self.connection.poll_body(cx)).await {
            match frame?.into_data() {
                Ok(data) => parsed.body.extend_from_slice(&data),
                Err(frame) => parsed.trailers = frame.into_trailers().ok(),
            }
        }
        Ok(())
    }
}

/// The bytes that the scripted upstream will send, one piece per read. The upstream discards all
/// bytes that it receives.
#[derive(Clone, Debug, Default)]
struct ScriptedSocket(Arc<Mutex<VecDeque<Bytes>>>);

impl ScriptedSocket {
    fn pieces(&self) -> std::sync::MutexGuard<'_, VecDeque<Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Socket for ScriptedSocket {
    fn is_quiet(&self) -> bool {
        self.pieces().is_empty()
    }
}

impl AsyncRead for ScriptedSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pieces = self.pieces();
        if let Some(mut piece) = pieces.pop_front() {
            let chunk = piece.split_to(piece.len().min(buffer.remaining()));
            buffer.put_slice(&chunk);
            if !piece.is_empty() {
                pieces.push_front(piece);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ScriptedSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tidegate_config::Config;

    use super::*;

    #[test]
    fn a_response_is_parsed_however_it_is_split() {
        let text = "proxy: {listen: '127.0.0.1:0', upstreams: [{name: app, urls: 'http://h'}]}";
        let settings = Config::parse(text).unwrap().proxy.unwrap();
        let response = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: 1\r\n\r\n2;x\r\nok\r\n0\r\nB: 2\r\n\r\n";
        for stride in [1, 7, response.len()] {
            let mut connection = ScriptedConnection::open(&settings);
            for _ in 0..2 {
                assert!(connection.is_ready());
                let pieces = response.as_bytes().chunks(stride).map(<[u8]>::to_vec);
                let parsed = connection.send(Method::GET, pieces);
                assert_eq!(parsed.problem, None);
                let head = parsed.head.unwrap();
                assert_eq!((head.status().as_u16(), head.headers().len()), (200, 1));
                assert_eq!(parsed.body, b"ok");
                assert_eq!(parsed.trailers.unwrap()["b"], "2");
            }
            let parsed = connection.send(
                Method::GET,
                [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nno".to_vec()],
            );
            assert_eq!((&*parsed.body, connection.is_ready()), (&b"no"[..], false));
            assert!(parsed.problem.unwrap().contains("end of file"));
        }
    }
}
