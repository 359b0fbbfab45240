//! Explains why an operator command got no response: what happened, in plain words, and what to do.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs as _},
    time::Duration,
};

use rustls::{AlertDescription, CertificateError};

use crate::admin_address::AdminAddress;

const OTHER_ADDRESS: &str =
    "if the admin listener has another address, pass that address with --admin or TIDEGATE_ADMIN";

/// The timeout of a request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// The timeout of the probe that finds out whether a listener uses TLS.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns a message that says why there was no response from `address`, and what to do about it.
pub(crate) fn unreachable(address: &AdminAddress, error: &ureq::Error, is_tls: bool) -> String {
    let (problem, advice) = explain(address, error, is_tls);
    format!("cannot reach the admin endpoint at {address}: {problem}; {advice}")
}

fn explain(address: &AdminAddress, error: &ureq::Error, is_tls: bool) -> (String, String) {
    if let Some(error) = tls_error(error) {
        return explain_tls(address, error);
    }
    if is_unknown(address, error) {
        return (
            format!("the host name \"{}\" cannot be resolved", address.host),
            "check the host of --admin or TIDEGATE_ADMIN".to_owned(),
        );
    }
    let is_running = format!("is the server running? {OTHER_ADDRESS}");
    let advice = match kind(error) {
        Some(ErrorKind::ConnectionRefused) => format!(
            "{is_running}; the address is `listen.admin` in the server's rules file, and `off` disables the admin listener"
        ),
        Some(ErrorKind::TimedOut) => {
            format!(
                "{is_running}; if the server is running, a firewall could be dropping the connection"
            )
        }
        Some(ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable) => {
            "check the address of --admin or TIDEGATE_ADMIN, and the network of this machine"
                .to_owned()
        }
        _ if !is_tls && has_tls(address) => {
            return (
                "the listener at this address uses TLS".to_owned(),
                "if this is the admin listener, pass the CA of its certificate with --admin-ca; otherwise pass the \
                 address of the admin listener with --admin"
                    .to_owned(),
            );
        }
        _ => format!("does the admin listener have this address? {OTHER_ADDRESS}"),
    };
    (describe(error), advice)
}

/// Describes the error without technical terms.
pub(crate) fn describe(error: &ureq::Error) -> String {
    match (kind(error), error) {
        (Some(ErrorKind::ConnectionRefused), _) => {
            "connection refused: no program listens on this address"
        }
        (Some(ErrorKind::TimedOut), _) => {
            return format!("no response within {} s", TIMEOUT.as_secs());
        }
        (Some(ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable), _) => {
            "this machine has no route to this address"
        }
        (
            Some(
                ErrorKind::UnexpectedEof
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe,
            ),
            _,
        ) => "the connection was closed before the response was complete",
        (_, ureq::Error::Protocol(_) | ureq::Error::LargeResponseHeader(..)) => {
            "the program at this address does not respond with HTTP"
        }
        (_, ureq::Error::Io(error)) => return system_error(error),
        (_, error) => return format!("the request failed ({error})"),
    }
    .to_owned()
}

/// Returns a message with the description of an operating system error, without its error number.
fn system_error(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    format!("the connection failed ({text})")
}

fn kind(error: &ureq::Error) -> Option<ErrorKind> {
    match error {
        ureq::Error::Io(error) => Some(error.kind()),
        ureq::Error::Timeout(_) => Some(ErrorKind::TimedOut),
        _ => None,
    }
}

/// Returns whether the host name cannot be resolved. Resolver errors do not have a specific
/// `ErrorKind`, so this function tries to resolve the host name again.
fn is_unknown(address: &AdminAddress, error: &ureq::Error) -> bool {
    let is_of_resolver = match error {
        ureq::Error::HostNotFound => return true,
        ureq::Error::Io(error) => error.raw_os_error().is_none(),
        _ => false,
    };
    let resolve = || (address.host.as_str(), address.port).to_socket_addrs();
    is_of_resolver && !address.is_ip() && resolve().is_err()
}

/// Returns whether the program at `address` responds to a plaintext request with a TLS alert.
fn has_tls(address: &AdminAddress) -> bool {
    let probe = || {
        let mut found = (address.host.as_str(), address.port).to_socket_addrs()?;
        let socket = found.next().ok_or(ErrorKind::NotFound)?;
        let mut stream = TcpStream::connect_timeout(&socket, PROBE_TIMEOUT)?;
        stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
        stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n")?;
        let mut head = [0; 2];
        stream.read_exact(&mut head)?;
        Ok::<_, io::Error>(head)
    };
    // 21 is the record type of an alert, and 3 is the major version of TLS.
    probe().is_ok_and(|head| head == [21, 3])
}

fn tls_error(error: &ureq::Error) -> Option<&rustls::Error> {
    match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

/// Explains a TLS failure. The name that rustls uses for the failure is in parentheses, so that
/// users can search for it.
fn explain_tls(address: &AdminAddress, error: &rustls::Error) -> (String, String) {
    use CertificateError as Invalid;
    let authority = "pass the CA that issued the certificate with --admin-ca or TIDEGATE_ADMIN_CA";
    let renew = "renew the certificate, and check the clock of this machine";
    let (problem, advice) = match error {
        rustls::Error::InvalidCertificate(invalid) => match invalid {
            Invalid::UnknownIssuer => (
                "the server's certificate is not from a CA in --admin-ca (UnknownIssuer)",
                authority,
            ),
            Invalid::NotValidForName | Invalid::NotValidForNameContext { .. } => {
                let host = &address.host;
                return (
                    format!("the server's certificate is not for the host \"{host}\""),
                    "pass a host name that is in the certificate with --admin or TIDEGATE_ADMIN"
                        .to_owned(),
                );
            }
            Invalid::Expired | Invalid::ExpiredContext { .. } => {
                ("the server's certificate has expired", renew)
            }
            Invalid::NotValidYet | Invalid::NotValidYetContext { .. } => {
                ("the server's certificate is not valid yet", renew)
            }
            invalid => {
                return (
                    format!("the server's certificate is invalid ({invalid:?})"),
                    "check the certificate of the listener, and --admin-ca".to_owned(),
                );
            }
        },
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => (
            "the listener requires a client certificate",
            "pass a client certificate with --admin-cert and --admin-key",
        ),
        rustls::Error::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::DecryptError
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown,
        ) => (
            "the listener rejected the client certificate",
            "pass a valid certificate from the listener's `client_ca` with --admin-cert and --admin-key",
        ),
        rustls::Error::InvalidMessage(_) => (
            "the listener at this address does not use TLS",
            "remove --admin-ca and TIDEGATE_ADMIN_CA, or pass the address of a listener with TLS",
        ),
        error => {
            return (
                format!("TLS cannot be established ({error})"),
                "check the `tls` settings of the listener, and --admin-ca".to_owned(),
            );
        }
    };
    (problem.to_owned(), advice.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages must not contain text from rustls, except its name for the error, in parentheses.
    #[test]
    fn failures_of_tls_have_advice_of_their_own() {
        let address = AdminAddress::parse("limits.internal").unwrap();
        let invalid = rustls::Error::InvalidCertificate;
        for (error, expected) in [
            (
                invalid(CertificateError::NotValidForName),
                "the server's certificate is not for the host \"limits.internal\"; pass a host",
            ),
            (
                invalid(CertificateError::Expired),
                "the server's certificate has expired; renew the certificate",
            ),
            (
                invalid(CertificateError::UnknownIssuer),
                "the server's certificate is not from a CA in --admin-ca (UnknownIssuer); pass",
            ),
            (
                rustls::Error::AlertReceived(AlertDescription::CertificateRequired),
                "the listener requires a client certificate; pass a client certificate",
            ),
        ] {
            // ureq returns a TLS error either directly or inside an I/O error.
            let inside = io::Error::new(ErrorKind::InvalidData, error.clone());
            for error in [ureq::Error::Rustls(error), ureq::Error::Io(inside)] {
                let message = unreachable(&address, &error, true);
                let begins = "cannot reach the admin endpoint at limits.internal:8082: ";
                assert!(
                    message.starts_with(&format!("{begins}{expected}")),
                    "{message}"
                );
            }
        }
    }

    #[test]
    fn errors_of_the_system_have_no_number() {
        let address = AdminAddress::parse("9").unwrap();
        for (number, expected) in [
            (
                errno::ENETUNREACH,
                "this machine has no route to this address; check the address",
            ),
            (
                errno::EACCES,
                "the connection failed (Permission denied); does",
            ),
            (
                errno::ECONNRESET,
                "the connection was closed before the response was complete; does",
            ),
            (
                errno::ECONNREFUSED,
                "connection refused: no program listens on this address; is the server running? ",
            ),
        ] {
            let error = ureq::Error::Io(io::Error::from_raw_os_error(number));
            let message = unreachable(&address, &error, true);
            let begins = "cannot reach the admin endpoint at 127.0.0.1:9: ";
            assert!(
                message.starts_with(&format!("{begins}{expected}")),
                "{message}"
            );
            assert!(
                !message.contains("os error") && !message.contains("TLS"),
                "{message}"
            );
        }
    }

    /// Linux error numbers.
    mod errno {
        pub(super) const EACCES: i32 = 13;
        pub(super) const ENETUNREACH: i32 = 101;
        pub(super) const ECONNRESET: i32 = 104;
        pub(super) const ECONNREFUSED: i32 = 111;
    }
}
