//! Baseline for Tidegate's reverse proxy: pingora-proxy, set up as in its own documentation, with
//! pingora-limits.
//!
//! ```text
//! pingora PORT UPSTREAM THREADS    listens on 127.0.0.1:PORT, forwards to 127.0.0.1:UPSTREAM
//! ```
//!
//! An IP address may request `/checked` five times per minute, and all other paths without a limit.
//! All requests are counted.

use std::{env, error::Error, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use pingora_core::{
    Error as ProxyError,
    ErrorType::HTTPStatus,
    Result as ProxyResult,
    server::{Server, configuration::ServerConf},
    upstreams::peer::HttpPeer,
};
use pingora_http::RequestHeader;
use pingora_limits::rate::Rate;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};

const CHECKED_LIMIT: isize = 5;

struct Proxy {
    upstream: u16,
    room: Rate,
    checked: Rate,
}

impl Proxy {
    fn client(session: &Session) -> Option<IpAddr> {
        Some(session.client_addr()?.as_inet()?.ip())
    }
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn request_filter(&self, session: &mut Session, (): &mut ()) -> ProxyResult<bool> {
        let client = Self::client(session);
        let is_checked = session.req_header().uri.path().starts_with("/checked");
        let rate = if is_checked {
            &self.checked
        } else {
            &self.room
        };
        if rate.observe(&client, 1) > CHECKED_LIMIT && is_checked {
            return Err(ProxyError::new(HTTPStatus(429)));
        }
        Ok(false)
    }

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> ProxyResult<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(
            ("127.0.0.1", self.upstream),
            false,
            String::new(),
        )))
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        (): &mut (),
    ) -> ProxyResult<()> {
        if let Some(client) = Self::client(session) {
            request.insert_header("x-forwarded-for", client.to_string())?;
        }
        request.insert_header("x-forwarded-proto", "http")?;
        if let Some(host) = request.headers.get("host").cloned() {
            request.insert_header("x-forwarded-host", host)?;
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [port, upstream, threads] = &args[..] else {
        return Err("usage: pingora PORT UPSTREAM THREADS".into());
    };
    let conf = ServerConf {
        threads: threads.parse()?,
        upstream_keepalive_pool_size: 128,
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let proxy = Proxy {
        upstream: upstream.parse()?,
        room: Rate::new(Duration::from_secs(1)),
        checked: Rate::new(Duration::from_secs(60)),
    };
    let mut service = http_proxy_service(&Arc::clone(&server.configuration), proxy);
    service.add_tcp(&format!("127.0.0.1:{port}"));
    server.add_service(service);
    server.run_forever()
}
