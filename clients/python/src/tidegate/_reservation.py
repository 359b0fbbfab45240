"""The state of a reservation, shared by `Reservation` and `AsyncReservation`."""

from __future__ import annotations

from typing import Optional

from ._verdict import Renewal, Reserved, Verdict


class ReservationState:
    """A reserved cost, and its token until it is settled.

    - `verdict`: the verdict. If it is a denial, there is nothing to settle.
    - `cost`: the final cost at which a `with` statement settles; initially, the reserved cost.
    - `reserved`: the reserved cost.
    - `token`: the token until the reservation is settled; `None` afterwards, or if there is no
      reservation.
    - `expires_in`: the seconds until expiry, counted from the server's last response.
    """

    def __init__(self, reserved: Reserved, cost: int, on_error: str) -> None:
        self.verdict: Verdict = reserved.verdict
        self.cost = cost
        self.reserved = cost
        self.token: Optional[str] = None
        self.expires_in: Optional[float] = None
        self._on_error = on_error
        if reserved.renewal is not None:
            self._replace(reserved.renewal)

    @property
    def allowed(self) -> bool:
        return self.verdict.allowed

    def __bool__(self) -> bool:
        return self.verdict.allowed

    def raise_if_denied(self) -> None:
        """Raises `Denied` if the request is denied."""
        self.verdict.raise_if_denied()

    def _replace(self, renewal: Renewal) -> None:
        self.token = renewal.token
        self.expires_in = renewal.expires_in

    def _final_cost(self, has_failed: bool) -> Optional[int]:
        """Returns the cost at which a `with` statement settles, or `None` if it does not settle."""
        if not has_failed or self._on_error == "settle":
            return self.cost
        return 0 if self._on_error == "cancel" else None
