//! The identity of a TLS client, taken from its verified certificate.

use rustls::{ServerConnection, pki_types::CertificateDer};
use webpki::EndEntityCert;

/// The object identifier of a common name, 2.5.4.3, encoded in DER.
const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];

/// Returns the name of the client in its certificate (see [`cert_identity`]); `None` if it has
/// presented none.
#[must_use]
pub fn verified_name(session: &ServerConnection) -> Option<String> {
    // rustls returns only verified certificates.
    cert_identity(session.peer_certificates()?.first()?)
}

/// Returns the first DNS name of `certificate` in lower case. Without a DNS name, returns the first
/// URI (as in SPIFFE). Without a URI, returns the subject's common name.
pub fn cert_identity(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    if let Some(name) = certificate.valid_dns_names().next() {
        return Some(name.to_ascii_lowercase());
    }
    let uri = certificate.valid_uri_names().next();
    uri.or_else(|| common_name(certificate.subject()))
        .map(str::to_owned)
}

/// Returns the first common name in the attribute sets of a `subject`.
fn common_name(mut subject: &[u8]) -> Option<&str> {
    while !subject.is_empty() {
        let (_, mut set, others) = element(subject)?;
        subject = others;
        while !set.is_empty() {
            let (_, attribute, others) = element(set)?;
            set = others;
            let (_, kind, value) = element(attribute)?;
            let (tag, text, _) = element(value)?;
            // The accepted tags are UTF8String, PrintableString and IA5String. The older string
            // types are not UTF-8.
            if kind == COMMON_NAME && matches!(tag, 0x0c | 0x13 | 0x16) {
                return std::str::from_utf8(text).ok();
            }
        }
    }
    None
}

/// Splits the first element off `der`. Returns the tag, the content and the remaining bytes.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = der.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        // In the long form, one or two more bytes contain the length. A length of two bytes is
        // enough for a name.
        0x81 | 0x82 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            let length = bytes
                .iter()
                .fold(0, |length, byte| length << 8 | usize::from(*byte));
            (length, rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

#[cfg(test)]
mod tests {
    use rcgen::{
        CertificateParams, DistinguishedName, DnType, KeyPair, SanType, string::Ia5String,
    };

    use super::*;

    fn named(common: &[&str], names: Vec<SanType>) -> Option<String> {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "Acme");
        for name in common {
            params.distinguished_name.push(DnType::CommonName, *name);
        }
        params.subject_alt_names = names;
        let key = KeyPair::generate().unwrap();
        cert_identity(params.self_signed(&key).unwrap().der())
    }

    #[test]
    fn a_client_has_one_name() {
        let dns = |name: &str| SanType::DnsName(Ia5String::try_from(name).unwrap());
        let uri = |name: &str| SanType::URI(Ia5String::try_from(name).unwrap());
        let spiffe = "spiffe://acme.test/billing";
        for (common, names, expected) in [
            (
                ["c"].as_slice(),
                vec![uri(spiffe), dns("A.Test"), dns("b.test")],
                Some("a.test"),
            ),
            (&["c"], vec![uri(spiffe)], Some(spiffe)),
            (&["Büro 7"], Vec::new(), Some("Büro 7")),
            (&[], Vec::new(), None),
        ] {
            assert_eq!(named(common, names).as_deref(), expected);
        }
        let long = "n".repeat(300);
        assert_eq!(named(&[&long], Vec::new()), Some(long));
        assert_eq!(
            cert_identity(&CertificateDer::from(vec![0x30, 0x82, 0xff])),
            None
        );
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let subject = [0x31, 8, 0x30, 6, 6, 3, 0x55, 4, 3, 0x0c, 1, b'x'];
        assert_eq!(
            common_name(&subject),
            None,
            "the value is longer than its declared length"
        );
        let subject = [0x31, 10, 0x30, 8, 6, 3, 0x55, 4, 3, 0x0c, 1, b'x'];
        assert_eq!(common_name(&subject), Some("x"));
        for at in 0..subject.len() {
            common_name(&subject[..at]);
            for byte in 0..=255 {
                let mut strange = subject;
                strange[at] = byte;
                common_name(&strange);
            }
        }
    }
}
