//! Baseline for Tidegate's HTTP listener: hyper with the listener's own settings and one runtime
//! per core. It reads every request and responds with a recorded response from the listener,
//! without making a decision.
//!
//! ```text
//! hyper-alone PORT            serves on 127.0.0.1:PORT
//! ```

use std::{
    convert::Infallible,
    env,
    error::Error,
    net::{TcpListener, TcpStream},
    thread,
};

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    runtime::Builder,
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    task::{LocalSet, spawn_local},
};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const POLICY: HeaderValue = HeaderValue::from_static(r#""default";q=1000000;w=2592000000"#);
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const STATE: HeaderValue = HeaderValue::from_static(r#""default";r=999999;t=2592"#);
const BODY: &str = r#"{"allowed":true,"rule":null,"limit":1000000,"remaining":999999,"reset_after_ms":2592000,"retry_after_ms":0,"delay_ms":0,"exactness":"exact","limits":[{"rule":null,"policy":"1000/30d burst 999999","allowed":true,"over_limit":false,"limit":1000000,"remaining":999999,"reset_after_ms":2592000,"retry_after_ms":0,"delay_ms":0,"shadow":false}]}"#;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [port] = &args[..] else {
        return Err("usage: hyper-alone PORT".into());
    };
    let listener = TcpListener::bind(("127.0.0.1", port.parse()?))?;
    let workers: Vec<_> = (0..thread::available_parallelism()?.get())
        .map(|_| worker())
        .collect();
    for (turn, client) in listener.incoming().enumerate() {
        workers[turn % workers.len()].send(client?)?;
    }
    Ok(())
}

fn worker() -> UnboundedSender<TcpStream> {
    let (deal, dealt) = mpsc::unbounded_channel();
    thread::spawn(move || {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .build()
            .expect("a runtime");
        LocalSet::new().block_on(&runtime, serve(dealt));
    });
    deal
}

async fn serve(mut dealt: UnboundedReceiver<TcpStream>) {
    while let Some(client) = dealt.recv().await {
        spawn_local(async move {
            client.set_nodelay(true)?;
            client.set_nonblocking(true)?;
            let stream = TokioIo::new(tokio::net::TcpStream::from_std(client)?);
            let mut settings = http1::Builder::new();
            settings
                .header_read_timeout(None)
                .half_close(true)
                .writev(false);
            // Serving a connection returns an error if the client disconnects, so ignore the
            // result.
            let _ = settings.serve_connection(stream, service_fn(answer)).await;
            Ok::<_, std::io::Error>(())
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    // If the body is incomplete, the client has disconnected, so the response does not matter.
    drop(request.into_body().collect().await);
    let mut answer = Response::new(Full::new(Bytes::from_static(BODY.as_bytes())));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, JSON);
    headers.insert(RATELIMIT_POLICY, POLICY);
    headers.insert(RATELIMIT, STATE);
    Ok(answer)
}
