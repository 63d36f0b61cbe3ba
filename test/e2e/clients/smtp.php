<?php
// Sends as the example of PHPMailer does. Arguments: tls or ssl, the sender, the recipient.
require '/usr/share/php/libphp-phpmailer/autoload.php';
use PHPMailer\PHPMailer\PHPMailer;

[, $way, $sender, $to] = $argv;
$mail = new PHPMailer(true);
$mail->isSMTP();
$mail->Host = 'smtp.gmail.com';
$mail->SMTPAuth = true;
$mail->Username = 'user@gmail.com';
$mail->Password = 'pass-of-the-program';
$mail->SMTPSecure = $way === 'ssl' ? PHPMailer::ENCRYPTION_SMTPS : PHPMailer::ENCRYPTION_STARTTLS;
$mail->Port = $way === 'ssl' ? 465 : 587;
$mail->setFrom($sender);
$mail->addAddress($to);
$mail->Subject = "phpmailer-$way";
$mail->Body = "sent by phpmailer-$way\n.a line with a dot\n";
$mail->send();
