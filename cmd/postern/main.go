// Command postern runs the code of AI agents in sealed sandboxes and lets
// nothing out until policy or a person has allowed exactly that.
//
// This package reads the configuration, wires the parts together and starts
// every goroutine of the daemon; what the program does is in internal.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"postern/internal/sandbox/keeper"
)

func main() {
	if keeper.IsKeeper(os.Args) {
		keeper.Main()
		return
	}
	if len(os.Args) > 1 && (os.Args[1] == "up" || os.Args[1] == "gateway") {
		overwriteGarbage()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// commands returns the commands below postern itself, by section, in the order
// in which the overview lists them.
func commands() (all []*command) {
	for _, part := range []struct {
		section  section
		commands []*command
	}{
		{gettingStarted, []*command{onboardCommand(), upCommand(), setupCommand(), loginCommand(), logoutCommand()}},
		{reviewing, []*command{
			reviewCommand(), queueCommand(), pendingCommand(), showCommand(), approveCommand(), rejectCommand(), commentCommand(), editCommand(), revisionsCommand(), cancelCommand(), resolveCommand(),
			snoozeCommand(), unsnoozeCommand(), assignCommand(), unassignCommand(),
			stopCommand(), resumeCommand(), quarantineCommand(), policyCommand(),
		}},
		{sandboxing, []*command{runCommand(), runsCommand(), contractCommand(), boundaryCommand(), sandboxCommand(), sshCommand(), forwardCommand(), volumeCommand(), webhookCommand(), secretCommand(), networkCommand(), templateCommand(), traceCommand(), verifyCommand()}},
		{mailing, []*command{
			inboxCommand(), mailboxCommand(), grantCommand(), accountCommand(), appCommand(), messageCommand(), sendCommand(), draftCommand(), mcpCommand(),
			domainCommand(), dkimCommand(), suppressionCommand(), suspensionCommand(), verifyMessageCommand(), verifyRunCommand(),
		}},
		{admitting, []*command{personCommand(), notifyCommand(), projectCommand(), keyCommand()}},
		{recording, []*command{auditCommand()}},
		{serving, []*command{gatewayCommand(), configCommand(), backupCommand(), versionCommand(), manCommand()}},
	} {
		for _, c := range part.commands {
			c.section = part.section
			all = append(all, c)
		}
	}
	return all
}
