-- A receipt is an array: the instant of the charge (CHARGED_AT), the ledger at that time
-- (CHARGED_LEDGER), the mark of the charge in each state (the mark of the first state is at
-- MARKS + 1), and the algorithms. A mark identifies the charge in its state. The algorithms of the
-- states are the digits of an octal number. Receipts of earlier versions lack this number.
local CHARGED_AT, CHARGED_LEDGER, MARKS = 1, 2, 2
