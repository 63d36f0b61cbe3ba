package smtpserver

// ProposalReply is proposalReply, for tests.
var ProposalReply = proposalReply
