package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"postern/client"
)

// An agent proposes an email and waits until a person has decided.
func Example() {
	ctx := context.Background()
	c, err := client.New("https://mail.example.com", os.Getenv("POSTERN_INBOX_KEY"))
	if err != nil {
		log.Fatal(err)
	}
	inbox, err := c.Inboxes.Own(ctx)
	if err != nil {
		log.Fatal(err)
	}
	p, err := c.Messages.Send(ctx, inbox.ID, client.NewMessage{To: []string{"bob@example.com"}, Subject: "Report", Markdown: "It is *done*."})
	if errors.Is(err, client.ErrBlocked) {
		fmt.Println("policy forbids it:", err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	a, err := c.Actions.WaitDecided(ctx, p.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(a.State, a.Reason)
}

// A person reviews what waits, on the server's machine.
func ExampleActionService_Approve() {
	ctx := context.Background()
	c, err := client.New("unix:/var/lib/postern/postern.sock", "")
	if err != nil {
		log.Fatal(err)
	}
	waiting, err := c.Actions.List(ctx, 100, client.StatePending)
	if err != nil {
		log.Fatal(err)
	}
	for _, w := range waiting {
		a, err := c.Actions.Get(ctx, w.ID) // with its view
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q\n%q\n", a.View.Title, a.View.Text) // quoted: an agent wrote it
		if _, err := c.Actions.Approve(ctx, a, "checked"); errors.Is(err, client.ErrStale) {
			continue // it has changed since it was read
		} else if err != nil {
			log.Fatal(err)
		}
	}
}

// An agent answers mail as it arrives.
func ExampleMessageService_Wait() {
	ctx := context.Background()
	c, err := client.New("https://mail.example.com", os.Getenv("POSTERN_INBOX_KEY"))
	if err != nil {
		log.Fatal(err)
	}
	const inbox = "support@agents.example.com"
	after, err := c.Messages.Position(ctx, inbox)
	if err != nil {
		log.Fatal(err)
	}
	for {
		arrived, err := c.Messages.Wait(ctx, inbox, after)
		if err != nil {
			log.Fatal(err)
		}
		after = arrived.After
		for _, m := range arrived.Messages {
			full, err := c.Messages.Get(ctx, inbox, m.ID)
			if err != nil {
				log.Fatal(err)
			}
			fmt.Println(full.Fenced) // what a model should read
			if _, err := c.Messages.Reply(ctx, inbox, m.ID, client.Reply{NewMessage: client.NewMessage{Text: "Thank you."}}); err != nil {
				log.Fatal(err)
			}
		}
	}
}

// Mail is listed page after page, as the loop needs it.
func ExampleMessageService_List() {
	ctx := context.Background()
	c, err := client.New("https://mail.example.com", os.Getenv("POSTERN_INBOX_KEY"))
	if err != nil {
		log.Fatal(err)
	}
	for m, err := range c.Messages.List(ctx, "support@agents.example.com", client.MessageQuery{Unread: true}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%q from %q\n", m.Subject, m.From)
	}
}
